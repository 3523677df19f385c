"""The benchmark of keeping: its grids, its judgement of choices, its tables, and the throttled folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.keep import grid as grid_module
from benchmarks.keep import judging
from benchmarks.keep.cells import FORCED, OURS, cell_rows
from benchmarks.keep.choices import choice_table, summary
from benchmarks.keep.disks import Disk
from benchmarks.keep.filling import RUNS as FILLS
from benchmarks.keep.filling import counted_forecast, fill_table
from benchmarks.keep.grid import HELD, TRIAL, KeepCell, codecs_of, recorded, world_of
from benchmarks.keep.judging import alternations, best_of, every_choice, judge, text_of
from benchmarks.keep.machines import Machines
from benchmarks.keep.one_machine import RUNS as MACHINES
from benchmarks.keep.one_machine import errors_of, machine_table
from benchmarks.keep.slow_folder import slow_folder, why_not
from benchmarks.keep.whole_job import replay
from hapi.errors import UsageError
from hapi.profiler.profile import Job
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import RAW, Prices
from hapi.profiler.reuse.job_cost import JobPricer

CELL = KeepCell(
    model="resnet18", bs=64, bandwidth=15e6, epochs=10, disk="150 MB/s", room=4.0, memory=False, codecs=True,
    speed=1, beside_store=False,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs of few samples."""
    monkeypatch.setattr(grid_module, "SAMPLES", 256)
    yield


def test_the_held_grid_shares_nothing_with_the_one_for_trials() -> None:
    held, trial = HELD.cells(500), TRIAL.cells(500)
    assert len({cell.key for cell in held}) == 500 and held[:100] == HELD.cells(100)
    assert not {(c.model, c.bs) for c in held} & {(c.model, c.bs) for c in trial}
    assert not {c.bandwidth for c in held} & {c.bandwidth for c in trial}
    assert len({cell.model for cell in held}) == 7 and {cell.epochs for cell in held} >= {1, 30, 100}


@pytest.mark.slow
def test_truths_are_recorded_profiles_under_other_conditions() -> None:
    world = world_of(replace(CELL, speed=10, beside_store=True))
    profile = recorded()["resnet18", 64]
    assert (
        world.profile.link.bits_per_second == 15e6 and world.server is not None and world.client is not None
    )
    assert world.profile.step_seconds == pytest.approx(profile.step_seconds / 10)
    assert world.profile.layers[0].output_bytes == profile.layers[0].output_bytes
    assert world.client.budget == 4 * grid_module.SAMPLES * profile.sent_bytes(profile.last_split)
    codecs = codecs_of("vgg19", 38, 1)
    assert [at.cut for at in codecs] == list(range(1, 39)) and all(
        c.ratio > 1 for at in codecs for c in at.codecs
    )


@pytest.mark.slow
def test_a_cell_is_judged_by_replays(small: None) -> None:
    found = judge(CELL)
    assert found["kind"] == "choice" and found["cell"] == CELL.key and found["mode"] == "keep here"
    assert 0 < found["best"] <= min(found["planned"], found["run"]) and found["run_choices"]
    assert found["planned_bytes"][0] <= found["budget"][0]
    assert judge(CELL, found) == {**found, "replayed": 0}, "the best one is known"
    with pytest.raises(UsageError, match="the replay is another one than in the known results"):
        judge(CELL, {**found, "planned": 2 * found["planned"]})


def test_a_plan_of_two_phases_is_replayed_as_planned(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(
        CELL, model="densenet121", bs=32, bandwidth=1e10, room=0.3, codecs=False, speed=10, epochs=4
    )
    choice = Choice(mode="keep here", cut=19, crossing=Crossing(split=9)).then(Crossing(split=14))
    world = world_of(cell)
    cost = JobPricer(world.profile, world.job, judging.sampled_facts(world, ()), choice).job_cost(Prices())
    plan = choose_reuse(world.profile, world.job, judging.sampled_facts(world, ()))
    plan = replace(plan, cost=replace(cost, later_epoch=2))
    splits = [judging.planned_choice(plan, epoch).crossing.split for epoch in range(4)]
    assert splits == [9, 9, 14, 14] and text_of(choice).endswith("; then keep here 19, split 14")
    assert all(judging.planned_choice(plan, epoch).later is None for epoch in range(4))


def test_a_run_begins_with_estimates_that_are_off_and_pays_what_is_true(small: None) -> None:
    world = world_of(CELL)
    codecs = codecs_of(CELL.model, world.profile.last_split, CELL.speed)
    for at in codecs:
        guessed = judging.estimated(at)
        assert guessed == judging.estimated(at) != at and guessed.cut == at.cut
        for guess, true in zip(guessed.codecs, at.codecs, strict=True):
            assert guess.name == true.name and guess.ratio >= 1
            assert abs(guess.ratio / true.ratio - 1) <= judging.RATIO_ERROR + 1e-9
            assert abs(guess.encode / true.encode - 1) <= judging.RATE_ERROR + 1e-9
    machines = Machines(world.profile, world.job, world.client, world.server)
    choice = judging.RunPolicy(world, codecs)(machines, 0)
    true_codecs = [RAW, *(codec for at in codecs for codec in at.codecs)]
    wire = choice.crossing.wire
    assert choice.codec in true_codecs and wire in true_codecs
    assert {choice.codec, wire} != {RAW}, "one was chosen that was never tried on much"


def test_nothing_better_is_left_out(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all choices, each replayed to its end, none is better than the best that was found."""
    cell = replace(CELL, epochs=3, speed=10, bandwidth=1e9)
    alternating = world_of(cell)
    world = replace(alternating, job=replace(alternating.job, alternate=False))
    monkeypatch.setattr(judging, "ENOUGH", 0.0)
    seconds, choice, replayed = best_of(world, (), float("inf"))
    every = list(every_choice(world, ()))
    truth = min(replay(world, lambda m, e, c=c: c).seconds for c in every)  # type: ignore[misc]
    assert seconds == truth and choice in every and replayed < len(every)
    pairs = alternations(alternating, every, float("inf"))
    shares = [one.crossing.alternation for _, one in pairs]
    assert all(one is not None and one.share <= 0.5 for one in shares)
    assert all(bound <= replay(alternating, lambda m, e, c=c: c).seconds for bound, c in pairs[:3])  # type: ignore[misc]
    assert best_of(alternating, (), seconds)[0] <= seconds


def choice_record(**changes: Any) -> dict[str, Any]:
    record = {
        "kind": "choice", "cell": "a", "chosen": "keep here 1, split 1", "mode": "keep here", "forecast": 10.0,
        "forecast_bytes": 5, "planned": 10.0, "planned_kept": 1.0, "planned_bytes": [5.0, 0.0], "run": 10.4,
        "run_bytes": [5.0, 0.0], "run_choices": ["recompute, split 0"], "best": 10.0, "best_choice": "keep here",
        "budget": [10, 0],
    }  # fmt: skip
    return {**record, **changes}


def test_the_table_of_choices() -> None:
    records = [choice_record() for _ in range(18)]
    records += [choice_record(planned=10.6), choice_record(run=20.0, run_bytes=[11.0, 0.0])]
    found = summary(records)
    assert found["planned"]["within"] == 0.95 and found["run"]["worst"] == 1.0 and found["over_budget"] == 1
    text = "\n".join(choice_table(records))
    assert "as planned reached, as a run chooses reached" in text and "+100% a" in text
    assert choice_table([]) == [] and summary([]) == {"cells": 0}
    assert "as planned missed" in "\n".join(choice_table([*records, choice_record(planned=11.0)]))


def fill_record(forecast: float, seconds: float | None, **changes: Any) -> dict[str, Any]:
    forecasts = [{"part": 0.125, "seconds": 1.0}, {"part": 0.25, "seconds": forecast}]
    fill = {"samples": 512, "forecasts": forecasts, "seconds": seconds}
    disk = {"read": 15e6, "write": 15e6, "slow_write": None, "fast_bytes": 0}
    record = {
        "kind": "fill", "name": "15 MB/s", "disk": disk, "samples": 512, "budget": 10**9, "most_bytes": 10**8,
        "fill": fill, "epochs": [1.0], "kept": [512],
    }  # fmt: skip
    return {**record, **changes}


def test_the_table_of_fills() -> None:
    records = [fill_record(9.5, 10.0), fill_record(8.0, 10.0), fill_record(8.0, None)]
    lines = fill_table(records)
    assert "-5.0%, within" in lines[1] and "-20.0%, missed" in lines[2] and "not full" in lines[3]
    assert lines[-1].endswith("1 of 3; over the byte budget: 0") and fill_table([]) == []
    slow = fill_record(9.5, 10.0, disk={**records[0]["disk"], "slow_write": 1e6})
    assert counted_forecast(slow) is None  # the slow part was not known yet
    assert len({run.name for run in FILLS}) == len(FILLS)


def test_estimates_of_one_machine_are_beside_the_epochs() -> None:
    profile = recorded()["resnet18", 64]
    job = Job(bs=64, samples=256)
    epochs = [
        {"seconds": seconds, "split": 11, "splits": splits, "client_seconds": 1.0, "server_seconds": 1.0}
        for seconds, splits in ((2.0, [[11, 4]]), (9.0, [[0, 2], [11, 2]]), (2.2, [[11, 4]]))
    ]
    record = {
        "kind": "one machine", "key": "resnet18/64", "samples": 256, "profile": profile.to_json(),
        "job": {"bs": 64, "samples": 100}, "epochs": epochs,
    }  # fmt: skip
    found = errors_of(record)
    assert found["seconds"] == 2.1 and found["split"] == 11 and found["one machine"] > found["as if on two"]
    assert job.bs == 64 and "split 11" in machine_table([record])[1] and machine_table([]) == []
    assert errors_of({**record, "epochs": epochs[1:2]}) == {} and len({run.key for run in MACHINES}) == len(
        MACHINES
    )


def test_measured_cells_compare_the_choice_with_each_forced_mode() -> None:
    def run(way: str, seconds: list[float], planned: int) -> dict[str, Any]:
        epochs = [
            {
                "epoch": i,
                "loss": 1.0,
                "seconds": s,
                "server_cpu": 0.1,
                "bytes": 1,
                "feature_hits": i * planned,
            }
            for i, s in enumerate(seconds)
        ]
        return {
            "kind": "run", "cell": "resnet18/1000000", "model": "resnet18", "bandwidth": 1e6, "way": way,
            "planned": planned, "repeat": 0, "job": "x", "start": 9.0, "end": 0.0, "epochs": epochs,
        }  # fmt: skip

    records = [run(way, [2.0, 2.0, 2.0], 20) for way in FORCED]
    assert cell_rows(records) == []
    records += [run(OURS, [2.0, 2.05], 2), run(OURS, [2.0, 2.2, 2.2], 20)]
    two, twenty = cell_rows(records)
    assert two["epochs"] == 2 and two["over"] == pytest.approx(0.0125)
    assert twenty["over"] == pytest.approx(0.095)
    assert twenty["as_best"] and not two["as_best"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--part filling", "expected one of choices"),
        ("--trial", "only with --part choices"),
        ("--best pyproject.toml", "give the JSON of an earlier run"),
        ("--best docs/measurements/wire-2core-2026-11-21.json", "holds no replayed cells"),
    ],
)
def test_wrong_flags(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keep", *flags.split(), "--results", str(tmp_path / "found.jsonl")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.jsonl"
    arguments = ["keep", "--view", "--results", str(path), "--json", str(tmp_path / "found.json")]
    assert main(arguments) == 2 and "cannot be read" in capsys.readouterr().err
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in (choice_record(), fill_record(9.5, 10.0)))
    )
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "1 cells replayed" in said and "fills on throttled disks" in said
    assert json.loads((tmp_path / "found.json").read_text())["choices"]["cells"] == 1


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason="no throttled folder can be made")
def test_a_throttled_folder_is_there_and_gone_again(tmp_path: Path) -> None:
    with slow_folder(tmp_path, 32 << 20) as slow:
        disk = Disk(read=1e9, write=1e9, slow_write=5e8, fast_bytes=1 << 20)
        before = slow.written_bytes()
        with slow.like(disk), (slow.path / "data").open("wb") as file:
            file.write(os.urandom(4 << 20))
            file.flush()
            os.fsync(file.fileno())
        assert slow.written_bytes() - before >= 4 << 20
        device = (slow.path / "data").stat().st_dev
    assert not (tmp_path / "disk").is_mount() and not (tmp_path / "disk.img").exists()
    assert tmp_path.stat().st_dev != device
