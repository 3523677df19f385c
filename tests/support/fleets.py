"""Crafted fleets for the simulator: every cost is 0 unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hapi.cluster.simulation.fleet import Fleet, ServerGroup, TrainerGroup
from hapi.cluster.simulation.replay import Profiles, replay
from hapi.cluster.simulation.results import Replayed
from hapi.profiler.profile import Job, Profile
from support.profiler_tools import crafted, free_server


def a_profile(
    *,
    outputs: Sequence[int] = (100, 100, 10),
    forward: Sequence[float] = (0.0, 0.0, 0.0),
    suffix: Sequence[float] | None = None,
    server: dict[str, Any] | None = None,
    **changes: Any,
) -> Profile:
    """A profile whose costs are those named; a server of a GPU, four requests at a time."""
    own = free_server(**{"concurrency": 4, "cos_batch": 8, **(server or {})})
    here = (0.0,) * len(outputs) if suffix is None else suffix
    return crafted(outputs, forward, here, server=own, **changes)


def a_job(**changes: Any) -> Job:
    """A long epoch of batches of 8 samples, one request each, a few of them ahead."""
    return replace(Job(bs=8, samples=1 << 20, request_size=8, in_flight=2, prefetch_bytes=6000), **changes)


def servers(count: int = 1, **changes: Any) -> ServerGroup:
    """A group of servers."""
    return ServerGroup(**{"name": "store", "count": count, **changes})


def trainers(count: int = 1, **changes: Any) -> TrainerGroup:
    """A group of trainers at split 1, unless told otherwise."""
    return TrainerGroup(**{"name": "job", "profile": Path("p.json"), "count": count, "split": 1, **changes})


def a_fleet(store: ServerGroup | None = None, jobs: TrainerGroup | None = None, **changes: Any) -> Fleet:
    """A fleet of one group of each, for ten simulated seconds."""
    known: dict[str, Any] = {"seconds": 10.0, "warm_up": 2.0}
    return Fleet(servers=(store or servers(),), trainers=(jobs or trainers(),), **(known | changes))


def replayed(fleet: Fleet, profile: Profile, job: Job | None = None) -> Replayed:
    """The replay of a fleet whose trainers all have one profile."""
    return replay(fleet, profiles_of(fleet, profile, job))


def profiles_of(fleet: Fleet, profile: Profile, job: Job | None = None) -> Profiles:
    """One profile for all groups."""
    return {group.name: (profile, job or a_job()) for group in fleet.trainers}
