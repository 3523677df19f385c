"""The tables of an evaluation, from results that are made up here."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split.study import (
    Measured,
    _chance,
    by_halves,
    errors,
    errors_of_epochs,
    measured_cells,
    optimality,
    slower_than,
    surely_slower,
    unfit_cells,
)
from benchmarks.split.views import VIEWS
from benchmarks.testbed.cells import PAPER_MODELS, Cell, Grid, Results, done_record, read
from hapi.errors import ConfigError, UsageError

CELL = Cell(model="resnet18", bs=16, bandwidth=1e7)
CHOICES = {"auto": 2, "hapi": 1, "nsg": 0, "bandwidth": 3, "min": 3, "freeze": 3, "none": 0}


def run(split: int, seconds: float, **changes: Any) -> dict[str, Any]:
    whole = {"ok": True, "over": False, "bytes": 1000 * split}
    return {"kind": "run", "cell": CELL.key, "split": split, "seconds": seconds, **whole, **changes}


def records() -> list[dict[str, Any]]:
    plan = {
        "kind": "plan", "cell": CELL.key, "choices": CHOICES, "auto": [2.0, 1.0, 1.1, 3.0],
        "paper": [2.0, 1.5, 1.6, 3.0], "sum": [4.0, 3.0, 3.0, 5.0], "wire": [1, 2, 3, 4], "ok": True,
    }  # fmt: skip
    runs = [
        run(2, 1.0),
        run(1, 1.04),
        run(0, 1.5, over=True),
        run(3, 1.12),
        run(2, 1.2),
        run(1, 1.04),
        run(2, 1.0),
    ]
    none = {"kind": "none", "cell": CELL.key, "form": "float32", "ok": True, "over": False, "seconds": 2.5}
    return [plan, *runs, none, done_record(CELL, 9.0)]


def test_medians_bounds_and_the_best() -> None:
    (one,) = measured_cells(records())
    assert one.cell == CELL and one.best == 1.0
    assert (
        one.seconds(2) == 1.0 and one.seconds(1) == 1.04 and one.seconds(0) is None and one.bounds == {0: 1.5}
    )
    assert one.slower(3) == pytest.approx(0.12) and one.slower(0) is None
    assert one.tensors == {"float32": 2.5}


def test_a_split_that_was_run_again_is_no_longer_broken_off() -> None:
    again = records()
    again.insert(-1, run(0, 1.3))
    (one,) = measured_cells(again)
    assert one.seconds(0) == 1.3 and not one.bounds


def test_optimality() -> None:
    cells = measured_cells(records())
    places = {name: optimality(cells, name) for name in CHOICES}
    assert places["auto"].optimal == 1 and places["auto"].good == 1.0
    assert places["hapi"].within_5 == 1 and places["hapi"].good == 1.0
    assert places["min"].within_15 == 1 and places["min"].good == 0.0
    assert places["none"].beyond == 1


def test_errors_of_the_estimates() -> None:
    cells = measured_cells(records())
    assert errors(cells, "auto", chosen_by="auto") == [pytest.approx(0.1)]
    assert sorted(errors(cells, "auto")) == pytest.approx([0.04 / 1.04, 0.1, 1.88 / 1.12])
    assert errors(cells, "sum", chosen_by="nsg") == []


def test_an_oracle_with_half_of_the_epochs_is_judged_by_the_other_half() -> None:
    # Split 2 has 1.0, 1.2, 1.0: medians 1.0 and 1.2; split 1 has 1.04 twice. Each half finds another one best.
    cells = measured_cells(records())
    assert by_halves(cells) == [pytest.approx(1.2 / 1.04 - 1), pytest.approx(0.04)]
    assert by_halves(cells, "auto") == [pytest.approx(1.2 / 1.04 - 1), 0.0]
    assert by_halves(cells, "hapi") == [0.0, pytest.approx(0.04)]
    assert by_halves(cells, "min") == [math.inf, math.inf], "measured once, as it was far from the best"
    assert "oracle: best by the other half  within 5% 50.0, within 10% 50.0 of 2" in "\n".join(
        VIEWS["optimality"](cells)
    )


def test_without_repeats_the_halves_say_nothing() -> None:
    (once,) = measured_cells([r for i, r in enumerate(records()) if i not in (5, 6, 7)])
    assert by_halves([once]) == [] and errors_of_epochs([once]) == []
    assert "half" not in "\n".join(VIEWS["optimality"]([once]))


def test_where_splits_are_alike_and_epochs_differ_an_oracle_fails_as_often_as_any_choice() -> None:
    luck = random.Random(1)
    cells = []
    for _ in range(300):
        runs = [run(split, luck.gauss(1.0, 0.06)) for _ in range(4) for split in range(4)]
        (one,) = measured_cells([records()[0], *runs, done_record(CELL, 9.0)])
        cells.append(one)
    oracle, first = (sum(s <= 0.05 for s in by_halves(cells, name)) / 600 for name in (None, "none"))
    assert oracle == pytest.approx(first, abs=0.1) and oracle < 0.8


def cell_of(runs: dict[int, list[float]], **bound: float) -> Measured:
    found = [run(split, seconds) for split, times in runs.items() for seconds in times]
    over = [run(2, seconds, over=True) for seconds in bound.values()]
    (one,) = measured_cells([records()[0], *found, *over, done_record(CELL, 9.0)])
    return one


def test_a_choice_is_surely_slower_when_its_epochs_say_so_whatever_the_noise() -> None:
    apart = cell_of({0: [1.0, 1.01, 1.02], 2: [1.08, 1.09, 1.1]})
    mixed = cell_of({0: [1.0, 1.01, 1.3], 2: [1.08, 1.09, 1.1]})
    broken_off = cell_of({0: [1.0]}, bound=1.3)
    assert surely_slower([apart], 0.05) == 1 and surely_slower([apart], 0.10) == 0
    assert surely_slower([mixed], 0.05) == 0, "one of twenty orders is not this one"
    assert surely_slower([broken_off], 0.10) == 1
    assert surely_slower([cell_of({2: [1.0, 1.1, 1.2]})], 0.0) == 0, "the best is not slower than itself"
    assert "> 5% 50.0, > 10% 0.0" in "\n".join(VIEWS["optimality"]([apart, mixed]))


def test_auto_beside_the_better_of_none_and_freeze() -> None:
    # None takes split 0, freeze split 3, auto split 2; split 1 is better than all of them and does not count.
    slower = cell_of({0: [1.0, 1.01, 1.02], 1: [0.5, 0.5, 0.5], 2: [1.08, 1.09, 1.1], 3: [2.0]})
    as_fast = cell_of({0: [1.0, 1.2, 1.3], 2: [1.1, 1.2, 1.22], 3: [1.21]})
    noisy = cell_of({0: [1.0, 1.01, 1.3], 2: [1.08, 1.09, 1.1], 3: [2.0]})
    cells = [slower, as_fast, noisy]
    assert slower_than(cells, 0.03, ("none", "freeze")) == 2
    assert surely_slower(cells, 0.03, ("none", "freeze")) == 1
    assert slower_than([cell_of({2: [1.0]})], 0.03, ("none", "freeze")) == 0, "both were broken off"
    assert "(goal: in no cell): 2 of 3, beyond doubt (rank-sum test of their epochs): 1" in "\n".join(
        VIEWS["competitors"](cells)
    )


@given(
    fast=st.lists(st.integers(0, 6).map(float), min_size=1, max_size=5),
    slow=st.lists(st.integers(0, 6).map(float), min_size=1, max_size=5),
)
def test_the_chance_of_an_order_is_that_of_all_ways_to_draw_it(fast: list[float], slow: list[float]) -> None:
    both = fast + slow
    ranks = [sum(x < v for x in both) + (both.count(v) + 1) / 2 for v in both]
    drawn = [sum(ranks[i] for i in those) for those in combinations(range(len(both)), len(slow))]
    least = sum(ranks[len(fast) :])
    assert _chance(fast, slow) == pytest.approx(sum(total >= least for total in drawn) / len(drawn))


def test_what_one_epoch_says_of_another() -> None:
    cells = measured_cells(records())
    assert sorted(errors_of_epochs(cells, chosen_by="auto")) == pytest.approx([0.1 / 1.1, 0.1 / 1.1, 0.2])
    assert len(errors_of_epochs(cells)) == 5, "split 3 was measured once"


def test_every_view_prints_every_cell() -> None:
    cells = measured_cells(records())
    shown = {name: "\n".join(view(cells)) for name, view in VIEWS.items()}
    assert "100.0" in shown["optimality"] and ">1.50" in shown["competitors"] and ">3" in shown["competitors"]
    assert "2: 1.00*a" in shown["splits"] and "0: >1.50" in shown["splits"]
    for name in ("competitors", "bandwidth", "traffic", "splits"):
        assert "resnet18" in shown[name]


def test_nothing_measured_is_said_so() -> None:
    with pytest.raises(UsageError, match="run 'python -m benchmarks sweep' first"):
        measured_cells(records()[:-1])


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "sweep.jsonl"
    first = Results(path, {"date": "then"})
    for record in records():
        first.add(record)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "run", "cell": "half')
    second = Results(path, {"date": "now"})
    assert second.done(CELL) and not second.done(Cell(model="resnet18", bs=16, bandwidth=2e7))
    second.add(run(1, 1.0))
    found = list(read(path))
    assert len(found) == len(records()) + 3 and found[-1]["split"] == 1
    assert [r["date"] for r in found if r["kind"] == "conditions"] == ["then", "now"]


@pytest.mark.parametrize("content", ["not json", "[1, 2]\n", json.dumps({"kind": 5})])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a results file"):
        list(read(path))
    assert path.read_text() == content


def test_a_device_is_not_read_for_ever() -> None:
    with pytest.raises(UsageError, match="/dev/zero: is not a plain file"):
        list(read(Path("/dev/zero")))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        Results(tmp_path / "file" / "sweep.jsonl", {})
    with pytest.raises(UsageError, match="cannot be read"):
        list(read(tmp_path / "absent"))


def test_the_grid_has_every_cell_once_and_begins_spread_out() -> None:
    cells = Grid().cells()
    assert len(cells) == len({c.key for c in cells}) == 7 * 4 * 3
    first = cells[: 7 * 3]
    assert {c.model for c in first} == set(PAPER_MODELS)
    assert len({c.bs for c in first}) == 4 and len({c.bandwidth for c in first}) == 3
    assert [(c.model, c.bs) for c in cells[:3]] == [(cells[0].model, cells[0].bs)] * 3, (
        "no reload between them"
    )
    assert Grid().samples(16) % 16 == 0 and Grid().samples(384) == 6 * 384


def test_a_twin_has_the_times_of_the_split_that_was_measured_for_it() -> None:
    told = [*records(), {"kind": "twin", "cell": CELL.key, "split": 7, "of": 2}]
    told += [{"kind": "twin", "cell": CELL.key, "split": 8, "of": 0}]
    (one,) = measured_cells(told)
    assert one.seconds(7) == one.seconds(2) and one.bytes_received[7] == one.bytes_received[2]
    assert one.seconds(8) is None and one.lower_bound(8) == one.lower_bound(0)


def test_what_ran_out_of_memory_is_shown_and_counted() -> None:
    starved = [r for r in records() if r["kind"] != "run"]
    starved[1:1] = [run(1, 1.0), run(2, 0.0, ok=False), run(3, 0.0, ok=False)]
    cells = measured_cells(starved)
    assert optimality(cells, "auto").unfit == 1 and optimality(cells, "min").unfit == 1
    for name, view in VIEWS.items():
        assert view(cells), name
    assert "OOM" in "\n".join(VIEWS["competitors"](cells)) and "OOM" in "\n".join(VIEWS["bandwidth"](cells))
    assert unfit_cells(starved) == 0
    nothing = [r for r in starved if not r.get("ok") or r["kind"] != "run"]
    assert unfit_cells(nothing) == 1
