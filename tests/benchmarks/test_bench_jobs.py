"""The benchmark of jobs that share one prefix: a small run, and what its figures are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load.jobs import SPEEDS, TOGETHER, JobsResult, JobsSettings, Run, head, measure_jobs
from benchmarks.testbed.cells import Results

SMALL = JobsSettings(samples=64, image_size=32, bs=32, jobs=3, epochs=2, step=0.001, freeze=4)


def run(name: str, repeat: int, *seconds: float, computed: int = 64) -> Run:
    return Run(
        name=name,
        repeat=repeat,
        seconds=seconds,
        computed=computed,
        shared=0,
        sent_bytes=1,
        server_cpu=1.0,
        jobs_cpu=2.0,
    )


def test_figures_and_goals() -> None:
    names = [f"step {pause:g} s alone" for pause in SMALL.pauses]
    assert [*names, TOGETHER, SPEEDS] == list(SMALL.runs())
    runs = []
    for repeat, slower in enumerate((1.0, 1.5, 2.0)):
        runs += [run(name, repeat, seconds) for name, seconds in zip(names, (10.0, 20.0, 40.0), strict=True)]
        runs.append(run(TOGETHER, repeat, 11.0, 9.0, 8.0 * slower, computed=64 + 8 * repeat))
        runs.append(run(SPEEDS, repeat, 10.0, 20.0, 44.0 * slower))
    result = JobsResult(settings=SMALL, runs=runs, conditions={})
    assert result.figures() == pytest.approx({"passes": 1.25, "makespan": 1.2, "slower": 1.65})
    assert [pair["makespan"] for pair in result.pairs()] == pytest.approx([1.1, 1.2, 1.6])
    assert sum("missed" in line for line in result.table()) == 3


@pytest.mark.slow
@pytest.mark.long
def test_a_small_run_goes_on_where_it_was(forked_tiers: None, tmp_path: Path) -> None:
    path, told = tmp_path / "jobs.jsonl", list[str]()
    result = measure_jobs(SMALL, Results(path, head(SMALL)), told.append)
    runs = {run.name: run for run in result.runs}
    assert len(told) == len(runs) == 5
    assert runs["step 0.001 s alone"].computed == 64 and runs[TOGETHER].computed < 64 + 16
    assert runs[TOGETHER].shared >= (3 * 2 - 1) * 64
    assert len(result.table()) == 2 + 5 + 3
    path.write_text(path.read_text().rpartition('{"kind":"run"')[0])  # the last run is lost
    again = replace(SMALL, repeats=1)
    assert len(measure_jobs(again, Results(path, head(again)), told.append).runs) == 5 and len(told) == 6
