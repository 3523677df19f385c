"""Planning taken apart: the simulated world follows its scene, and a mechanism that is off is on again after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.planning_tools import JOB, truth

from benchmarks.split import ablate as module
from benchmarks.split.ablate import BATCHES, MECHANISMS, SCENES, Scene, ablate, simulate
from benchmarks.testbed.cells import read
from hapi.client.planning.drift import Drift
from hapi.profiler.stages import pipeline

RECORDED = Path(__file__).parents[2] / "docs" / "measurements" / "sweep-2core-2026-11-23.jsonl"


def test_a_simulated_job_follows_its_link_and_is_the_same_again() -> None:
    job = replace(JOB, samples=JOB.bs * BATCHES)
    steady = simulate(truth(), job, Scene(noise=0.0), 0)
    assert len(set(steady.splits)) == 1 and steady.changes == 1
    slow = simulate(truth(), job, SCENES["link /10"], 0)
    assert slow.splits[0] == slow.splits[2] != slow.splits[1] and 1.0 <= slow.over < 1.5
    assert simulate(truth(), job, SCENES["link /10"], 0) == slow


@pytest.mark.slow
def test_each_mechanism_is_off_in_its_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("none (all on)", "re-planning at all", "evidence of two batches")
    monkeypatch.setattr(module, "MECHANISMS", {name: MECHANISMS[name] for name in names})
    monkeypatch.setattr(module, "SCENES", {"link /10": SCENES["link /10"]})
    monkeypatch.setattr(module, "EVERY", 10)
    monkeypatch.setattr(module, "EPOCHS", 1)
    found = ablate([r for r in read(RECORDED) if "/48/" in r.get("cell", "/48/")], lambda line: None)
    assert [row["off"] for row in found.mechanisms] == list(names)
    assert found.mechanisms[0]["other_ends"] == 0 and found.mechanisms[1]["changes"] == 1
    assert found.norms[0]["norm"] == pipeline.OVERLAP_NORM == 8.0 and Drift.EVIDENCE == 2
    assert found.table()[2].startswith("none (all on)") and found.to_json()["benchmark"] == "ablate"
