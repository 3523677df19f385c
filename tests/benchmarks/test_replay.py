"""Choices made anew from the profiles that a sweep kept."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.profiler_tools import crafted, free_server

from benchmarks.__main__ import main
from benchmarks.split.replay import mean_profile, priced, replayed
from benchmarks.split.study import measured_cells
from benchmarks.testbed.cells import Cell, Grid, Results, done_record
from hapi.errors import ConfigError
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, LinkProfile, Profile
from hapi.profiler.strategies import PLANNERS, plan

CELL = Cell(model="alexnet", bs=8, bandwidth=1e7)
PROFILE = crafted(
    [1000, 500, 100],
    [0.001, 0.002, 0.0],
    [0.002, 0.004, 0.0],
    server=free_server(concurrency=2, cos_batch=2),
    link=LinkProfile(bits_per_second=8e6, variation=0.0, request_seconds=0.002),
    step_seconds=0.001,
)
JOB = Job(bs=8, samples=32, request_size=4)


def records(**plan_fields: Any) -> list[dict[str, Any]]:
    old = {"choices": dict.fromkeys(PLANNERS, 0), "auto": [9.0] * 3, "paper": [9.0] * 3, "sum": [9.0] * 3}
    kept = {"samples": 32, "wire": [1, 2, 3], "profile": PROFILE.to_json(), **old, **plan_fields}
    run = {"kind": "run", "cell": CELL.key, "ok": True, "over": False, "bytes": 7}
    return [
        {"kind": "conditions", "grid": asdict(Grid(request_size=4))},
        {"kind": "plan", "cell": CELL.key, **kept},
        {**run, "split": 0, "seconds": 2.0},
        {**run, "split": 1, "seconds": 1.0},
        done_record(CELL, 3.0),
    ]


def test_choices_and_estimates_are_those_of_the_profile() -> None:
    (one,) = measured_cells(list(replayed(records())))
    assert one.choices == {name: plan(name, PROFILE, JOB).split for name in PLANNERS}
    seconds = [estimate(PROFILE, JOB, split).epoch_seconds for split in range(PROFILE.last_split + 1)]
    assert one.estimates["auto"] == seconds and one.choices["none"] == 0 < one.choices["freeze"]
    assert one.wire == priced(PROFILE, JOB)["wire"]


def test_what_was_measured_stays() -> None:
    before, after = records(), list(replayed(records()))
    assert [r for r in after if r["kind"] != "plan"] == [r for r in before if r["kind"] != "plan"]
    (one,) = measured_cells(after)
    assert one.times == {0: [2.0], 1: [1.0]}


def test_a_cell_that_was_not_measured_whole_is_left_as_it_is() -> None:
    broken = records(profile="half a")[:-1]
    assert list(replayed(broken)) == broken


def test_the_grids_memory_bounds_the_choice() -> None:
    """As it did when the cell was measured."""
    need = priced(PROFILE, JOB)["memory"]
    tight = records()
    tight[0] = {"kind": "conditions", "grid": asdict(Grid(request_size=4, memory=min(need)))}
    (one,) = measured_cells(list(replayed(tight)))
    assert need[one.choices["auto"]] == min(need)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (records(profile={**PROFILE.to_json(), "version": 3}), "version is 3"),
        (records(profile={"version": PROFILE.to_json()["version"]}), "is missing"),
        (records()[1:], "was not recorded"),
        ([{k: v for k, v in r.items() if k != "profile"} for r in records()], "was not recorded"),
    ],
)
def test_what_cannot_be_planned_anew(damaged: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(replayed(damaged))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.jsonl"
    results = Results(path, {"grid": asdict(Grid(request_size=4))})
    for record in records()[1:]:
        results.add(record)
    said = []
    for flags in ((), ("--replay",)):
        assert main(["optimality", "--results", str(path), *flags]) == 0
        said.append(capsys.readouterr().out)
    assert "made anew" in said[1] and "made anew" not in said[0]
    path.write_text(path.read_text().replace('"version":4', '"version":3'))
    assert main(["optimality", "--results", str(path), "--replay"]) == 2
    assert "measure anew" in capsys.readouterr().err


def test_the_mean_of_profiles_is_of_what_was_measured() -> None:
    slow = replace(
        PROFILE,
        layers=tuple(replace(layer, server_seconds=3 * layer.server_seconds) for layer in PROFILE.layers),
        link=replace(PROFILE.link, bits_per_second=4e6),
        server=replace(PROFILE.server, cos_batch=4),
        notes=("slow",),
    )
    mean = mean_profile([PROFILE, PROFILE, slow])
    assert mean.link.bits_per_second == pytest.approx(20e6 / 3) and mean.server.cos_batch == 4
    for layer, first in zip(mean.layers, PROFILE.layers, strict=True):
        assert layer.server_seconds == pytest.approx(first.server_seconds * 5 / 3)
        assert (layer.client_seconds, layer.output_bytes) == (first.client_seconds, first.output_bytes)
    assert mean.notes == ("slow", "the mean of 3 profiles")
    assert Profile.from_json(mean.to_json()) == mean
    assert mean_profile([mean, mean]) == replace(mean, notes=(*mean.notes, "the mean of 2 profiles"))
