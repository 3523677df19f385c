"""The siege benchmark: its goals from made-up figures, and a short run of the real thing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.load.siege import SiegeSettings, measure_siege
from benchmarks.load.siege_figures import Siege
from benchmarks.load.siege_jobs import Rounds


def siege(**more: Any) -> Siege:
    quiet = {"one": Rounds(losses=[[2.0, 1.0]], seconds=[3.0])}
    rounds = {"one": Rounds(losses=[[2.0, 1.0], [2.0, 1.0]], seconds=[5.0, 6.0])}
    looks = [{"at": float(at), "seconds": 0.01} for at in range(10)]
    found: dict[str, Any] = {
        "settings": {}, "conditions": {}, "quiet": quiet, "rounds": rounds, "looks": looks, "down": [],
        "before": {"resident": 100, "descriptors": 10}, "after": {"resident": 105, "descriptors": 12},
        "log_bytes": 5000, "seen": {"garbage": Counter({"400": 7})}, "seconds": 60.0,
    }  # fmt: skip
    return Siege(**{**found, **more})


def missed(found: Siege) -> set[str]:
    return {name for name, goal in found.goals().items() if not goal["reached"]}


def test_a_good_siege_reaches_all_goals() -> None:
    assert missed(siege()) == set()
    assert any("400 7" in line for line in siege().table())


@pytest.mark.parametrize(
    ("more", "goal"),
    [
        ({"rounds": {"one": Rounds(losses=[[2.0, 1.0000001]])}}, "difference of losses"),
        ({"rounds": {"one": Rounds()}}, "difference of losses"),
        ({"looks": [{"at": 1.0, "seconds": None}]}, "slowest health answer, s"),
        ({"looks": []}, "slowest health answer, s"),
        ({"after": {"resident": 111, "descriptors": 12}}, "more resident memory"),
        ({"after": {"resident": 100, "descriptors": 19}}, "more descriptors"),
        ({"log_bytes": 1_000_001}, "log, bytes"),
    ],
)
def test_each_goal_can_be_missed(more: dict[str, Any], goal: str) -> None:
    assert missed(siege(**more)) == {goal}


def test_a_job_that_failed_is_told() -> None:
    rounds = {"one": Rounds(losses=[[2.0, 1.0]], failures=["exit code 1: it broke"])}
    found = siege(rounds=rounds)
    assert missed(found) == {"jobs that failed"}
    assert "  exit code 1: it broke" in found.table()


def test_looks_at_a_killed_server_do_not_count() -> None:
    looks = [{"at": 1.0, "seconds": 0.01}, {"at": 5.0, "seconds": None}, {"at": 9.0, "seconds": 0.02}]
    assert missed(siege(looks=looks, down=[(4.5, 6.0)])) == set()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_short_siege(forked_tiers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No goal in seconds is looked at: other tests run beside it."""
    monkeypatch.setattr("benchmarks.load.siege.SETTLE_SECONDS", 12.0)
    found = measure_siege(
        SiegeSettings(seconds=15.0, samples=96, epochs=2, kill_every=6.0), lambda line: None
    )
    loose = {"slowest health answer, s", "difference of losses", "more resident memory"}
    assert missed(found) <= loose, "\n".join(found.table())
    assert all(found.difference(job) < 1e-4 for job in found.rounds)  # halved COS batches round differently
    assert found.down and all(found.seen[name] for name in ("idle flood", "garbage", "hung reads"))
    assert found.to_json()["health"]["looks"]
