"""The benchmark of training beyond the memory: its groups, its tables and goals, its drives, and a small real run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.offload.drives import mixed_rate, slow_drive
from benchmarks.offload.figure import draw
from benchmarks.offload.paper import compare
from benchmarks.offload.rows import goals_of, left_out, rows_of, sizes_of, table
from benchmarks.offload.settings import (
    ACTIVE,
    GOALS,
    KEPT,
    MEMORY,
    NAIVE,
    RECOMPUTE,
    SERIAL,
    SHARES,
    SWAP,
    TAILS,
    OffloadSettings,
    parameters_of,
)
from benchmarks.offload.sizes import find_sizes, largest_that
from benchmarks.testbed.cells import Results
from hapi.errors import UsageError


def answer(
    seconds: float, nbytes: float = 0.0, rate: float | None = None, peak: int = 1000, swapped: float = 0.0
) -> dict[str, Any]:
    return {"seconds": seconds, "processor": seconds / 2, "system": 0.1, "faults": 12_345, "bytes": nbytes,
            "rate": rate, "waited": 0.0, "redone": 0.0, "peak": peak, "anonymous": peak // 2, "on_disk": 0,
            "swapped": swapped, "recomputed": 0}  # fmt: skip


def turn(group: str, number: int, **answers: Any) -> dict[str, Any]:
    return {
        "kind": "turn",
        "group": group,
        "turn": number,
        "ways": list(answers),
        "rows": 64,
        "parameters": 100_000_000,
        "drives": 3 if "3 drives" in group else 1,
        "answers": answers,
    }


def test_tails_have_the_sizes_that_are_asked_for() -> None:
    for name, count in zip(TAILS, (100e6, 218e6, 1e9), strict=True):
        assert parameters_of(name) == pytest.approx(count, rel=0.01)
    with pytest.raises(UsageError, match="--tail 7B"):
        parameters_of("7B")


def test_groups_have_keys_of_their_own() -> None:
    groups = [*OffloadSettings().groups(), *OffloadSettings(parts=(GOALS,)).groups()]
    assert len({group.key for group in groups}) == len(groups) == 22
    assert all(group.tail == "8M" for group in OffloadSettings(quick=True).groups())
    one = OffloadSettings(parts=(GOALS,), regimes=("I/O-bound",)).groups()
    assert [group.regime for group in one] == ["I/O-bound"], "nobody waits for goals that were not named"
    assert len(OffloadSettings(parts=(GOALS,)).groups()) == 4
    chosen = OffloadSettings(ways=(MEMORY, SERIAL))
    assert {group.ways for group in chosen.groups()} == {(MEMORY, SERIAL), (MEMORY,), (SERIAL,)}
    assert {cell.way for cell in chosen.size_cells()} == {MEMORY}


def test_goals_compare_ways_turn_by_turn() -> None:
    noisy = [
        turn("goals/100M/I/O-bound", number, memory=answer(slow), active=answer(2 * slow, 200, 100 / slow),
             naive=answer(2.6 * slow, 200, 100 / slow), serial=answer(2.4 * slow, 200, 100 / slow))
        for number, slow in enumerate((1.0, 3.0, 1.5))
    ]  # fmt: skip
    quiet = turn("goals/100M/compute-bound", 0, memory=answer(1.0), active=answer(1.1, 10, 100, peak=400))
    found = {goal.what.split(": ")[1]: goal for goal in goals_of([quiet, *noisy[:1]])}
    assert found["samples/s over AdamW in memory"].value == pytest.approx(1 / 1.1)
    assert not found["samples/s over AdamW in memory"].reached
    assert found["peak memory over AdamW's in memory"].reached
    found = {goal.what.rsplit(": ", 1)[1]: goal for goal in goals_of(noisy)}
    assert found["samples/s over naive"].value == pytest.approx(1.3) and found["samples/s over naive"].reached
    assert found["samples/s over serial"].low == pytest.approx(1.2)
    assert not found["samples/s over serial"].reached
    assert found["a step over max(compute, disk)"].value == pytest.approx(1.0)


def test_tables_and_figure_show_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [turn("steps/8M/I/O-bound", 0, memory=answer(1.0), active=answer(2.0, 100, 50))]
    records.append({"kind": "left out", "group": "steps/1B/I/O-bound", "way": MEMORY, "why": "needs 17 GB"})
    rows = rows_of(records)
    assert [(row.way, row.over_memory, row.over_bound) for row in rows] == [(MEMORY, 1, None), (ACTIVE, 2, 1)]
    assert left_out(records) == ["steps/1B/I/O-bound, AdamW in memory: needs 17 GB"]
    text = "\n".join(table(records))
    assert "Hapi, active" in text and " 12345 " in text and table([]) == ["nothing was measured yet"]
    draw(rows, [], compare(records, rows), str(tmp_path / "found.svg"))
    assert "AdamW in memory" in (tmp_path / "found.svg").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="nothing was measured"):
        draw([], [], [], str(tmp_path / "none.svg"))


def test_the_chosen_amount_is_compared_only_where_there_was_a_choice() -> None:
    forced = dict.fromkeys((RECOMPUTE, *SHARES, SWAP))
    same = {way: answer(1.0 + number, 100, 50, swapped=4e6) for number, way in enumerate(forced)}
    turns = [turn("swap/100M/I/O-bound", 0, active=answer(1.5, 100, 50, swapped=4e6), **same)]
    assert not [one for one in compare(turns, rows_of(turns)) if one.figure.startswith("9")]


def every_part() -> list[dict[str, Any]]:
    """Records of all parts that have a page."""
    forced = dict.fromkeys((RECOMPUTE, *SHARES, SWAP))
    curve = {way: answer(5.0 - number, 100, 50, swapped=1e6 * number) for number, way in enumerate(forced)}
    size = {"kind": "size", "how": "a control group of memory", "blocks": 1, "trials": {}}
    return [
        turn("steps/100M/I/O-bound", 0, memory=answer(1.0), active=answer(2.0, 100, 50), serial=answer(3.0, 100, 50)),
        turn("swap/100M/I/O-bound", 0, active=answer(1.03, 100, 50, swapped=4e6), **curve),
        turn("disks/100M/one batch/1 drives of 150 MB/s", 0, active=answer(6.0, 100, 50), serial=answer(9.0, 100, 50)),
        turn("disks/100M/one batch/3 drives of 150 MB/s", 0, active=answer(2.5, 100, 50), serial=answer(5.0, 100, 50)),
        {**size, "way": MEMORY, "cap": 1e9, "rows": 8, "parameters": 40_000_000},
        {**size, "way": KEPT, "cap": 1e9, "rows": 8, "parameters": 0},
        {**size, "way": ACTIVE, "cap": 1e9, "rows": 8, "parameters": 100_000_000},
        {**size, "way": KEPT, "cap": 1e9, "rows": 256, "parameters": 50_000_000},
        {**size, "way": ACTIVE, "cap": 1e9, "rows": 256, "parameters": 90_000_000},
    ]  # fmt: skip


def test_the_papers_figures_stand_beside_ours() -> None:
    records = every_part()
    found = {one.ours_is: one for one in compare(records, rows_of(records))}
    expected = {
        "samples/s over serial": 1.5,
        "samples/s over AdamW in memory": 0.5,
        "the cap over the largest tail": 10,
        "largest tail over that of AdamW in memory": 2.5,
        "largest tail over the one whose activations stay in memory": 1.8,
        "the planned step over the fastest of five forced amounts": 1.03,
        "samples/s with three throttled drives over one": 2.4,
    }
    assert {name: found[name].ours for name in expected} == {
        name: pytest.approx((value, value)) for name, value in expected.items()
    }
    assert found["samples/s over serial"].paper == (1.33, 1.33)
    assert "samples/s over naive" not in found and compare([], []) == []
    apart = [
        turn("steps/1B/I/O-bound", 0, active=answer(2.0, 100, 50)),
        turn("steps/1B/I/O-bound", 0, memory=answer(1)),
    ]
    assert compare(apart, rows_of(apart)) == []


@pytest.mark.slow
def test_each_figure_of_the_paper_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = every_part()
    rows = rows_of(records)
    draw(rows, sizes_of(records), compare(records, rows), str(tmp_path / "found.svg"))
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(texts) == sorted(f"found-{number}.svg" for number in (5, 6, 7, 8, 9, 10))
    for number, words in {
        5: "section V-C",
        6: "section V-B",
        8: "in 1 GB",
        9: "planned",
        10: "drives",
    }.items():
        text = texts[f"found-{number}.svg"]
        assert words in text and f"LoHan's Figure {number}" in text


@pytest.mark.parametrize(("largest", "most"), [(0, 9), (1, 9), (5, 9), (9, 9), (20, 9), (8, 100)])
@pytest.mark.parametrize("guess", [0, 1, 4, 30])
def test_the_largest_size_is_found(largest: int, most: int, guess: int) -> None:
    asked: list[int] = []
    found = largest_that(lambda count: asked.append(count) or count <= largest, most, guess)  # type: ignore[func-returns-value]
    assert found == min(largest, most) and len(asked) == len(set(asked)) and max(asked) <= most


def test_slow_drives_keep_their_rate(tmp_path: Path) -> None:
    drive = slow_drive(10e6)(tmp_path / "states", 1 << 20)
    values = np.frombuffer(np.arange(1 << 17, dtype=np.int64).tobytes(), np.uint8)[: 1 << 19]
    held = np.empty((1 << 19) + 4096, np.uint8)
    at = -held.ctypes.data % 4096
    aligned = held[at : at + (1 << 19)]
    aligned[:] = values
    began = time.monotonic()
    drive.write(0, aligned)
    aligned[:] = 0
    drive.read(0, aligned)
    drive.close()
    assert time.monotonic() - began >= 2 * (1 << 19) / 10e6
    assert (aligned == values).all()


def test_the_rate_of_several_drives_is_that_of_all(tmp_path: Path) -> None:
    assert 0 < mixed_rate([tmp_path], 1, 400e6) <= 2 * 400e6
    assert not list(tmp_path.iterdir())


def test_a_bound_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="600 MB at least"):
        find_sizes(OffloadSettings(caps=(1e6,)), tmp_path, Results(tmp_path / "found.jsonl", {}), print)


def test_a_size_that_the_disk_bounds_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    settings = OffloadSettings(caps=(1e9,), ways=(ACTIVE,), quick=True)
    results = Results(tmp_path / "found.jsonl", {})
    find_sizes(settings, tmp_path, results, print)
    assert sizes_of(results.records) == []
    assert left_out(results.records) == [
        "size/batch of 8, Hapi, active: 0 blocks, the most that the disk has room for, train in 1 GB"
    ]


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["offload", "--part", "all"]) != 0
    assert main(["offload", "--tail", "9B", "--results", str(tmp_path / "none.jsonl")]) != 0
    assert main(["offload", "--way", "none", "--results", str(tmp_path / "none.jsonl")]) != 0
    assert main(["offload", "--batch", "large", "--results", str(tmp_path / "none.jsonl")]) != 0
    assert main(["offload", "--part", "aside", "--folder", str(tmp_path / "none")]) != 0
    error = capsys.readouterr().err
    assert (
        "--part all" in error
        and "--tail 9B" in error
        and "--batch large" in error
        and "--way none" in error
        and "is not a folder" in error
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "goals", "ways"),
    [
        pytest.param(
            "steps --batch I/O-bound --way memory --way active", 0, {MEMORY, ACTIVE}, marks=pytest.mark.long
        ),
        pytest.param("goals", 8, {MEMORY, ACTIVE, NAIVE, SERIAL}, marks=pytest.mark.long),
        pytest.param("swap", 0, {ACTIVE}, marks=pytest.mark.long),
        pytest.param("disks", 0, {ACTIVE}, marks=pytest.mark.long),  # slow drives take two minutes
    ],
)
def test_a_small_run_measures_and_goes_on(
    parts: str, goals: int, ways: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    flags = ["offload", "--quick", "--turns", "1", "--part", *parts.split(), "--folder",
             str(scratch), "--results", str(tmp_path / "found.jsonl")]  # fmt: skip
    assert main([*flags, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert len(found["goals"]) == goals and not found["left_out"]
    assert {row["way"] for row in found["rows"]} >= ways
    assert all(row["moved"] > 0 and row["rate"] > 0 for row in found["rows"] if row["way"] == ACTIVE)
    assert not list(scratch.iterdir())
    capsys.readouterr()
    assert main(flags) == 0
    assert "0 groups to measure" in capsys.readouterr().err
