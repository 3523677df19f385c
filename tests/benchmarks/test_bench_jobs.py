"""The benchmark of jobs that share one prefix: a small run, and what its figures are made of."""

from __future__ import annotations

import pytest

from benchmarks.load.jobs import JobsResult, JobsSettings, Run, measure_jobs

SMALL = JobsSettings(
    samples=64, image_size=32, bs=32, jobs=3, epochs=2, pauses=(0.001, 0.002), step=0.001, freeze="4"
)


def run(*seconds: float, computed: int = 64) -> Run:
    return Run(seconds=seconds, computed=computed, shared=0, sent_bytes=1)


def test_figures_and_goals() -> None:
    result = JobsResult(
        settings=SMALL,
        alone=run(10.0),
        together=run(11.0, 9.0, 12.0, computed=80),
        paused_alone=[run(1.0), run(2.0)],
        paused_together=run(1.02, 2.2),
        conditions={},
    )
    assert result.figures() == pytest.approx({"passes": 1.25, "makespan": 1.2, "slower": 1.1})
    assert sum("missed" in line for line in result.table()) == 3


@pytest.mark.slow
def test_a_small_run() -> None:
    result = measure_jobs(SMALL, lambda line: None)
    assert result.alone.computed == 64 and result.together.computed < 3 * 64  # with those topped up
    assert result.together.shared >= (3 * 2 - 1) * 64
    assert len(result.table()) == 2 + 2 + 2 + 1 + 3
