"""The benchmark of whole jobs: its arithmetic, its file of records, and a small run on the test bed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.epochs.engine import PLAIN, all_runs, link_bytes
from benchmarks.epochs.figure import draw
from benchmarks.epochs.rows import codec_goals, goals_of, later, loss_difference, rows_of, table, total
from benchmarks.epochs.settings import WAYS, EpochsSettings, Prices
from benchmarks.testbed.cells import Results
from benchmarks.testbed.testbed import why_not

PRICES = Prices(egress=100.0, server=3600.0, trainer=0.0)


def run(
    way: str, seconds: list[float], *, planned: int = 30, repeat: int = 0, **changes: Any
) -> dict[str, Any]:
    """The record of a run: 2 s of start, 1 s of end, 1 MB and 0.5 s beside the store in each epoch."""
    epochs = [
        {"epoch": i, "loss": 1.0 / (i + 1), "seconds": s, "server_cpu": 0.5, "bytes": 1_000_000}
        for i, s in enumerate(seconds)
    ]
    record = {
        "kind": "run", "cell": "resnet18/1000000", "model": "resnet18", "bandwidth": 1e6, "way": way,
        "planned": planned, "repeat": repeat, "job": "64 images", "start": 2.0, "end": 1.0, "epochs": epochs,
    }  # fmt: skip
    return {**record, **changes}


def test_epochs_that_were_not_run_take_the_median_of_the_last_ones() -> None:
    found = run("plain", [10.0, 9.0, 2.0, 4.0])
    assert later(found, "seconds") == 3.0  # of 2 and 4
    assert total(found, "seconds", 3) == 21.0
    assert total(found, "seconds", 6) == 25.0 + 2 * 3.0
    assert total(found, "bytes", 6) == 6_000_000


def test_a_row_says_what_was_run_and_what_was_computed() -> None:
    one, thirty = rows_of([run("plain", [10.0, 2.0, 2.0])], (30, 1), PRICES)
    assert (one.epochs, one.measured_epochs, one.computed) == (1, 1, False)
    assert one.seconds == 2 + 10 + 1 and one.bytes_received == 1e6
    assert (thirty.epochs, thirty.measured_epochs, thirty.computed) == (30, 3, True)
    assert thirty.seconds == 2 + 10 + 29 * 2 + 1 and thirty.to_json()["computed_epochs"] == 27
    assert thirty.money == pytest.approx(30e6 / 1e9 * 100 + 15.0)
    assert thirty.loss == pytest.approx(1 / 3)


def test_rows_are_medians_of_the_repeats_and_the_longest_run_of_each_counts() -> None:
    records = [run("plain", [s, 1.0], repeat=i) for i, s in enumerate([5.0, 9.0, 6.0])]
    records += [run("plain", [7.0, 1.0, 1.0], repeat=1)]
    (row,) = rows_of(records, (2,), PRICES)
    assert row.first_seconds == 6.0 and row.seconds == 2 + 7 + 1


def test_a_way_that_plans_has_a_row_only_where_it_was_told_the_epochs() -> None:
    records = [run("hapi", [9.0], planned=1), run("hapi", [9.0, 1.0], planned=10)]
    assert [(row.epochs, row.seconds) for row in rows_of(records, (1, 2, 10), PRICES)] == [(1, 12), (10, 21)]


def test_the_verdict_is_on_the_longest_job() -> None:
    records = [
        run("recompute", [10.0, 10.0]), run("plain", [12.0, 0.5]), run("hapi", [10.2, 0.4]),
        run("hapi", [99.0], planned=1),
    ]  # fmt: skip
    rows = rows_of(records, (1, 30), PRICES)
    by_hand, gain, first = goals_of(rows)
    assert by_hand.value == pytest.approx((3 + 10.2 + 29 * 0.4) / (3 + 12 + 29 * 0.5)) and by_hand.reached
    assert gain.value == pytest.approx(303 / 24.8) and gain.reached
    assert first.value == pytest.approx(1.02) and first.reached
    records[2] = run("hapi", [10.4, 2.0])
    assert not any(goal.reached for goal in goals_of(rows_of(records, (1, 30), PRICES)))
    lines = table(records, rows, PRICES)
    assert (
        any(line.startswith("~ computed") for line in lines) and sum("reached" in line for line in lines) == 3
    )


def test_without_its_rivals_there_is_no_verdict() -> None:
    assert not goals_of(rows_of([run("plain", [1.0, 1.0])], (30,), PRICES))
    assert [
        goal.name
        for goal in goals_of(rows_of([run("hapi", [1.0, 1.0]), run("plain", [1.0, 1.0])], (30,), PRICES))
    ]


def test_losses_are_compared_epoch_by_epoch() -> None:
    other = run("hapi", [1.0, 1.0, 1.0])
    other["epochs"][1]["loss"] = 0.55
    records = [run("plain", [1.0, 1.0]), other]
    assert loss_difference(records, ["plain", "hapi"]) == {"resnet18/1000000": pytest.approx(0.1)}
    assert loss_difference(records, ["plain"]) == {"resnet18/1000000": 0.0}


def test_codecs_that_are_chosen_are_compared_in_pairs() -> None:
    seconds = ((10.0, 10.0), (10.0, 8.0), (9.0, 10.0), (7.0, None))
    records = []
    for repeat, (chosen, raw) in enumerate(seconds):
        records.append(run("wire auto", [1.0, chosen - 1.0], repeat=repeat))
        records += [] if raw is None else [run("wire none", [0.5, raw - 0.5], repeat=repeat)]
    (goal,) = codec_goals(records)
    assert goal.value == 1.0 and goal.reached and "3 pairs (0.900 to 1.250)" in goal.name
    assert any(
        "wire auto over wire none" in line for line in table(records, rows_of(records, (2,), PRICES), PRICES)
    )
    assert {way.name for way in WAYS if "codec" in way.title} == {
        "wire auto",
        "wire none",
        "cache auto",
        "cache none",
    }
    assert [way.caches for way in WAYS if way.name.startswith("cache ")] == [True, True]


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    settings = EpochsSettings(models=("resnet18",), bandwidths=(1e6,), counts=(1, 30), repeats=2)
    runs = all_runs(settings)
    assert len(runs) == 2 * (len(settings.ways) + 1)  # Hapi is told each number of epochs
    assert all(one.repeat == 0 for one in runs[: len(runs) // 2])
    head = {"grid": settings.measuring()}
    results = Results(tmp_path / "found.jsonl", head)
    for way in WAYS:
        results.add(run(way.name, [1.0] * 4))
    results.add(run("hapi", [1.0], planned=1, repeat=1))
    with (tmp_path / "found.jsonl").open("a") as file:
        file.write('{"kind":"run","cell":"resn')  # killed
    again = Results(tmp_path / "found.jsonl", head)
    left = [one for one in runs if not one.done(again)]
    assert [(one.way.name, one.planned) for one in left if not one.repeat] == [("hapi", 1)]
    assert ("hapi", 1) not in [(one.way.name, one.planned) for one in left if one.repeat]
    every = all_runs(EpochsSettings(models=("resnet18",), bandwidths=(1e6,), counts=(30,), measured=None))
    assert not any(one.done(again) for one in every)  # all epochs are more than four


def test_bytes_of_links(tmp_path: Path) -> None:
    row = "  {}: {} 2 0 0 0 0 0 0 {} 8 0 0 0 0 0 0\n"
    (tmp_path / "dev").write_text("Inter-|\n face |\n" + row.format("lo", 9, 9) + row.format("veth", 100, 70))
    assert link_bytes(tmp_path / "dev") == 70
    assert link_bytes(tmp_path / "gone") == 0


def test_the_plain_script_has_none_of_our_code() -> None:
    names = set()
    for node in ast.walk(ast.parse(PLAIN.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names and not names & {"hapi", "benchmarks"}


@pytest.mark.slow
def test_the_figure(tmp_path: Path) -> None:
    records = [run(way.name, [float(i + 5), 0.1 * i, 0.1 * i]) for i, way in enumerate(WAYS)]
    rows = rows_of(records, (1, 30), PRICES)
    draw(rows, str(tmp_path / "found.svg"), "solar cells")
    text = (tmp_path / "found.svg").read_text()
    assert "a job of 30 epochs (computed)" in text and "extract once by hand" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("epochs --model alexnet", "--model alexnet: the plain script has resnet50"),
        ("epochs --way slowly", "--way slowly: expected one of recompute"),
        ("epochs --measured 1", "--measured: expected 2 to"),
        ("epochs --samples 32", "--bs 64: there are fewer samples"),
        ("epochs --egress -1", "--egress: expected 0 to"),
        ("epochs --figure x.gif", "must end in"),
        ("epochs --view --results none.jsonl", "none.jsonl: cannot be read"),
    ],
)
def test_wrong_flags_get_one_line(
    arguments: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"no test bed here: {why_not()}")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "64", "--bs", "32", "--epochs", "1", "--epochs", "2", "--measured", "2"]
    cell = ["--model", "resnet18", "--bandwidth", "100Mbps", "--folder", str(tmp_path)]
    command = ["epochs", *cell, *sizes, "--results", str(tmp_path / "found.jsonl")]
    assert main([*command, "--way", "plain"]) == 0
    assert main([*command, "--way", "plain", "--way", "recompute", "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "extract once by hand" in out and "recompute in each epoch" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["way"], row["epochs"]) for row in found["rows"]] == [
        ("recompute", 1), ("recompute", 2), ("plain", 1), ("plain", 2)
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["bytes_received"] > 100_000 for row in found["rows"])
    assert found["rows"][1]["loss"] == pytest.approx(found["rows"][3]["loss"], rel=1e-5)
