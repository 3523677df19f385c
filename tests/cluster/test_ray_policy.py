"""Ray Serve's policy: what replicas tell becomes a number of replicas, or advice."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from hapi.cluster.scaling import ScalingRule

pytest.importorskip("ray", reason="the extra ray is not installed")
RULE = asdict(ScalingRule(lowest=1, highest=10))


def context(servers: int, now: float, **told: float) -> Any:
    """A fleet whose replicas all tell the same."""
    metrics = {name: dict.fromkeys(range(servers), value) for name, value in told.items()}
    return SimpleNamespace(
        target_num_replicas=servers, aggregated_metrics=metrics, current_time=now, app_name="hapi"
    )


SHORT = {"wait": 3.0, "stalled": 0.75, "busy": 1.0, "jobs": 2.0}
BUSY = {"wait": 0.0, "stalled": 0.0, "busy": 1.0, "jobs": 2.0}


@pytest.mark.parametrize(("act", "wanted"), [(True, 4), (False, 1)])
def test_it_acts_or_advises(act: bool, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hapi.cluster import ray_policy

    said: list[str] = []
    logger = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(ray_policy, "log", logger)
    policy = ray_policy.TrainerWaitPolicy(RULE, act)
    found = [policy(context(1, now, **SHORT))[0] for now in range(0, 60, 2)]
    assert set(found[:5]) == {1} and set(found[6:]) == {wanted}
    assert len(said) == 1 and ("scaling" if act else "advice: scale") + " from 1 to 4 servers" in said[0]


def test_replicas_without_trainers_do_not_thin_out_the_stall() -> None:
    from hapi.cluster.ray_policy import reading_of

    metrics = {
        "wait": {"a": 1.0, "b": 0.0},
        "stalled": {"a": 0.5, "b": 0.0},
        "busy": {"a": 1.0, "b": 0.5},
        "jobs": {"a": 3.0, "b": 0.0},
    }
    reading = reading_of(metrics)
    assert (reading.servers, reading.asked, reading.wait) == (2, 1, 0.5)
    assert (reading.stalled, reading.busy) == (0.5, 0.75)
    assert not reading_of({}).whole


def test_nothing_is_done_where_trainers_do_not_wait() -> None:
    from hapi.cluster.ray_policy import TrainerWaitPolicy

    policy = TrainerWaitPolicy(RULE, True)
    assert {policy(context(3, now, **BUSY))[0] for now in range(0, 600, 2)} == {3}


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://0.0.0.0:81", "http://10.0.0.7:81"),
        ("http://[::]:81", "http://10.0.0.7:81"),
        ("http://127.0.0.1:81", "http://127.0.0.1:81"),
    ],
)
def test_a_server_is_listed_where_it_is_reached(url: str, seen: str) -> None:
    from hapi.cluster.ray_serve import reachable

    assert reachable(url, "10.0.0.7") == seen


def test_a_status_becomes_what_a_replica_tells() -> None:
    from hapi.cluster.ray_serve import readings_of

    status = {
        "queue": {"running": 5, "slots": 4},
        "trainers": {"jobs": 2, "stalled": 0.25, "wait": 1.5},
    }
    assert readings_of(status) == {"wait": 1.5, "stalled": 0.25, "busy": 1.0, "jobs": 2.0}
