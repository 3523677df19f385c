"""The memory that forced amounts of swapping are compared in leaves a choice to small batches too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.offload.engine import WITHOUT_GRADIENTS, memory_between
from benchmarks.offload.program import Training, TrainTask
from benchmarks.offload.settings import ACTIVE, BLOCK_PARAMETERS, RECOMPUTE, SWAP
from hapi.offload import training


def test_a_share_of_the_way_is_taken_beside_what_is_always_there() -> None:
    assert memory_between({"constant": 100, "least": 10, "most": 30}, 0.5) == 120
    assert memory_between({"constant": 100, "least": 40, "most": 30}, 0.5) == 140


@pytest.mark.slow
def test_memory_between_the_least_and_the_most_leaves_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_LEAST_BYTES", training._LEAST_BYTES)  # tasks change it
    folders, memory = (str(tmp_path),), WITHOUT_GRADIENTS * 6 * BLOCK_PARAMETERS
    task = TrainTask(way=ACTIVE, blocks=6, rows=400, memory=memory, folders=folders, has_floor=False)

    def after_two_steps(task: TrainTask) -> tuple[dict[str, int], dict[str, float]]:
        made = Training(task)
        try:
            for _ in range(2):
                made.step()
            return made.needs(), made._plan()
        finally:
            made.close()

    needs, plan = after_two_steps(task)
    assert not plan["swapped"] and not plan["recomputed"], "all fits there"
    memory = memory_between(needs, 0.5)
    _, swapped = after_two_steps(replace(task, way=SWAP, memory=memory))
    _, recomputed = after_two_steps(replace(task, way=RECOMPUTE, memory=memory))
    assert recomputed["recomputed"] == 6 and not swapped["recomputed"]
    assert swapped["swapped"] > recomputed["swapped"]
