"""What the views of a sweep write beside their tables: figures, CSV and JSON, from results that are made up here."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.split.plots import PANELS
from benchmarks.split.study import measured_cells, optimality, rows, spreads
from benchmarks.split.views import VIEWS
from benchmarks.testbed.cells import Cell, Results, done_record
from benchmarks.testbed.conditions import write_csv
from hapi.errors import UsageError

CELLS = tuple(
    Cell(model=model, bs=16, bandwidth=bits) for model in ("alexnet", "vgg11") for bits in (1e7, 4e7)
)
CHOICES = {"auto": 1, "hapi": 1, "nsg": 2, "bandwidth": 2, "min": 2, "freeze": 2, "none": 0}


def records(cell: Cell, **of_none: Any) -> list[dict[str, Any]]:
    """Split 0 broken off (or as ``of_none`` says), 1 the best, 2 half as fast."""
    plan = {
        "kind": "plan", "cell": cell.key, "choices": CHOICES, "auto": [3.0, 1.1, 2.0], "paper": [3.0, 1.5, 2.5],
        "sum": [4.0, 3.0, 3.0], "wire": [5000, 9000, 100], "ok": True,
    }  # fmt: skip
    run = {"kind": "run", "cell": cell.key, "ok": True, "over": False, "bytes": 7000}
    none = {**run, "split": 0, "seconds": 1.5, "over": True, **of_none}
    return [
        plan,
        {**run, "split": 1, "seconds": 1.0},
        {**run, "split": 2, "seconds": 2.0},
        none,
        {"kind": "none", "cell": cell.key, "form": "uint8", "ok": True, "over": False, "seconds": 1.75},
        done_record(cell, 20.0),
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    kept = Results(tmp_path / "sweep.jsonl", {"date": "then", "test_bed": "made up"})
    for cell in CELLS:
        for record in records(cell):
            kept.add(record)
    return kept.path


@pytest.mark.slow_cases("optimality")
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_prints_draws_and_writes(name: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {flag: results.with_name(f"{name}.{flag}") for flag in ("svg", "csv", "json")}
    arguments = ["--figure", str(files["svg"]), "--csv", str(files["csv"]), "--json", str(files["json"])]
    assert main([name, "--results", str(results), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "4 cells" in printed and "made up" in printed
    drawn = files["svg"].read_text()
    assert "</svg>" in drawn and "mathdefault" not in drawn
    with files["csv"].open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3 * len(CELLS)
    assert table[1]["seconds"] == "1.0" and table[1]["chosen_by"] == "auto hapi"
    assert table[0]["seconds"] == "" and table[0]["longer_than"] == "1.5" and table[0]["bytes"] == "5000"
    document = json.loads(files["json"].read_text())
    assert document["rows"][1]["estimated_auto"] == 1.1 and document["conditions"][0]["date"] == "then"
    assert "\n".join(document["table"]) in printed


def test_there_is_a_figure_for_every_view() -> None:
    assert PANELS.keys() == VIEWS.keys()


def test_what_ran_out_of_memory_is_told_apart_from_what_is_slow() -> None:
    cells = measured_cells([*records(CELLS[0]), *records(CELLS[1], ok=False, over=False)])
    none = optimality(cells, "none")
    assert (none.beyond, none.unfit, none.cells) == (1, 1, 2)
    assert [row["out_of_memory"] for row in rows(cells)] == [False, False, False, True, False, False]


def test_the_papers_figures_stand_beside_ours(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["optimality", "--results", str(results)])
    lines = capsys.readouterr().out.splitlines()
    hapi = next(i for i, line in enumerate(lines) if line.startswith("hapi"))
    assert lines[hapi].split()[1:] == ["100.0", "0.0", "0.0", "0.0", "0.0", "0.0", "100.0"]
    assert lines[hapi + 1].split()[3:] == ["59.2", "27.6", "9.2", "2.0", "2.0", "0.0", "86.8"]
    main(["cpu-client", "--results", str(results)])
    assert "uint8 tensors                 1.75     1.75      4" in capsys.readouterr().out


def test_files_that_cannot_be_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, name, said in (
        ("--figure", "x.gif", "must end in"),
        ("--figure", "sweep.jsonl/x.png", "cannot be written"),
        ("--csv", "sweep.jsonl/x.csv", "cannot be written"),
        ("--json", "sweep.jsonl/x.json", "cannot be written"),
    ):
        code = main(["splits", "--results", str(results), flag, str(results.parent / name)])
        assert code == 2 and said in capsys.readouterr().err
    with pytest.raises(UsageError, match="nothing to write"):
        write_csv(str(results.with_name("x.csv")), [])
    assert sorted(p.name for p in results.parent.iterdir()) == ["sweep.jsonl"]


def test_results_of_another_kind_of_run_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    grid = {"models": ["alexnet"], "request_size": 16}
    Results(path, {"grid": grid, "limited": False})
    Results(path, {"grid": {**grid, "models": ["vgg11"]}, "limited": False})
    before = path.read_text()
    for other in ({"grid": {**grid, "request_size": 128}}, {"grid": grid, "limited": True}):
        with pytest.raises(
            UsageError, match=r"was measured with (request_size 16|limited False), this run has"
        ):
            Results(path, other)
    assert path.read_text() == before


def test_the_noise_of_repeats_is_told_beside_what_it_blurs(tmp_path: Path) -> None:
    cell = CELLS[0]
    (once,) = measured_cells(records(cell))
    for view in ("optimality", "estimates"):
        assert not any(line.startswith("noise") for line in VIEWS[view]([once]))
    again = {"kind": "run", "cell": cell.key, "ok": True, "over": False, "bytes": 7000}
    more = [{**again, "split": 1, "seconds": 1.2}, {**again, "split": 2, "seconds": 2.0}]
    (twice,) = measured_cells([*records(cell)[:-1], *more, done_record(cell, 20.0)])
    assert sorted(spreads([twice])) == [0.0, pytest.approx(0.2)]
    for view in ("optimality", "estimates"):
        assert "10.0% longer than the fastest in the median, 20.0% at" in VIEWS[view]([twice])[-1]
