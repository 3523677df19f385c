"""``benchmarks fleet``, the simulated part: herds of planners, knees, and fleets of up to 10,000 trainers.

Profiles are those of the kept sweep (:func:`benchmarks.keep.grid.recorded`), of servers and trainers with a core each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.keep.grid import recorded
from hapi.cluster.simulation.fleet import (
    Fleet,
    FleetEvent,
    Reaction,
    ServerGroup,
    SharedLink,
    TrainerGroup,
)
from hapi.cluster.simulation.replay import Profiles, replay
from hapi.cluster.simulation.results import Replayed
from hapi.profiler.profile import Job

BS = 64
MODELS = ("resnet18", "alexnet")
SERVER_LINKS = (20e6, 200e6)
KNEE_TRAINERS = 8
KNEE_SERVERS = (1, 2, 4, 8, 16)
ENOUGH = 0.95
"""Part of the largest throughput at which a fleet is large enough."""
REACTIONS: Mapping[str, Reaction] = {
    "at once": Reaction(hysteresis=0.0, holds=False),
    "hysteresis": Reaction(holds=False),
    "holds": Reaction(hysteresis=0.0),
    "both: the client's own": Reaction(),
    "at once, by chance 1/8": Reaction(hysteresis=0.0, holds=False, follow=0.125),
    "at once, averaged rates": Reaction(hysteresis=0.0, holds=False, smoothing=0.2),
    "both, by chance 1/8": Reaction(follow=0.125),
    "both, averaged rates": Reaction(smoothing=0.2),
}
HERD_TRAINERS, HERD_SERVERS, HERD_SECONDS, HERD_LINK = 24, 2, 160.0, 200e6
NARROW_FROM, NARROW_FOR, NARROW = 60.0, 50.0, 0.25
SCALES = ((1, 10), (10, 100), (100, 1000), (1000, 10_000))
Tell = Callable[[str], None]


def profiles(model: str, samples: int = 6400) -> Profiles:
    """Return the recorded profile of a model for the one group of trainers.

    Args:
        model: of the sweep.
        samples: of an epoch.
    """
    job = Job(bs=BS, samples=samples, request_size=BS, prefetch_bytes=256 << 20)
    profile = recorded()[model, BS]
    # Samples are stored as the papers have them: float32 tensors, which nobody has to decode.
    stored = replace(profile.samples, stored_bytes=profile.samples.tensor_bytes, encoded=False)
    tiers = (replace(tier, decode_seconds=0.0) for tier in (profile.server_tier, profile.client_tier))
    server, client = tiers
    return {"trainers": (replace(profile, samples=stored, server_tier=server, client_tier=client), job)}


def herd(tell: Tell) -> list[dict[str, Any]]:
    """Let all planners react to one link that all answers share, which becomes narrow for a while.

    Returns:
        A row for each way of reacting, and for each fixed split.
    """
    rows, known = [], profiles("resnet18")
    profile, _ = known["trainers"]
    for split in sorted({0, profile.freeze, profile.last_split}):
        rows.append(_herd_row(f"split {split}", _herd_fleet(split, Reaction()), known, fixed=True))
    for name, reaction in REACTIONS.items():
        tell(f"herd: {name}")
        rows.append(_herd_row(name, _herd_fleet("auto", reaction), known, fixed=False))
    return rows


def _herd_fleet(split: Any, reaction: Reaction) -> Fleet:
    narrow = FleetEvent(what="link", name="shared", at=NARROW_FROM, seconds=NARROW_FOR, factor=NARROW)
    return Fleet(
        servers=(ServerGroup(name="servers", count=HERD_SERVERS, link="shared"),),
        trainers=(
            TrainerGroup(
                name="trainers", profile=Path("recorded"), count=HERD_TRAINERS, split=split, spread=2.0
            ),
        ),
        links=(SharedLink(name="shared", bandwidth=HERD_LINK),),
        events=(narrow,),
        reaction=reaction,
        seconds=HERD_SECONDS,
        warm_up=20.0,
        detail="requests",
    )


def _herd_row(name: str, fleet: Fleet, known: Profiles, *, fixed: bool) -> dict[str, Any]:
    found = replay(fleet, known)
    batches = sum(group.samples for group in found.trainers) / BS
    return {
        "name": name,
        "fixed": fixed,
        "samples_per_second": found.samples_per_second,
        "changes_per_100_batches": 100 * sum(group.changes for group in found.trainers) / max(1.0, batches),
        "moved": moved(found.splits),
        "splits": [[at, {str(s): n for s, n in now.items()}] for at, now in found.splits],
    }


def moved(splits: Sequence[tuple[float, Mapping[int, int]]]) -> float:
    """Return the largest share of the trainers that changed between two moments that follow each other."""
    largest = 0.0
    for (_, before), (_, after) in pairwise(splits):
        count = sum(after.values())
        apart = sum(abs(after.get(s, 0) - before.get(s, 0)) for s in before.keys() | after.keys()) / 2
        largest = max(largest, apart / count if count else 0.0)
    return largest


def knees(tell: Tell) -> list[dict[str, Any]]:
    """Return the throughput of 16 trainers over the servers, for each model and link."""
    rows = []
    for model in MODELS:
        known = profiles(model)
        for link in SERVER_LINKS:
            tell(f"knees: {model}, {link / 1e9:g} Gbit/s")
            rates, splits = {}, {}
            for count in KNEE_SERVERS:
                found = replay(_knee_fleet(count, link), known)
                rates[count] = found.samples_per_second
                splits[count] = usual_split(found)
            knee = next(count for count in KNEE_SERVERS if rates[count] >= ENOUGH * max(rates.values()))
            rows.append(
                {
                    "model": model,
                    "link": link,
                    "rates": {str(count): rate for count, rate in rates.items()},
                    "splits": {str(count): split for count, split in splits.items()},
                    "knee": knee,
                    "per_trainer": knee / KNEE_TRAINERS,
                }
            )
    return rows


def _knee_fleet(count: int, link: float) -> Fleet:
    return Fleet(
        servers=(ServerGroup(name="servers", count=count, bandwidth=link),),
        trainers=(
            TrainerGroup(
                name="trainers", profile=Path("recorded"), count=KNEE_TRAINERS, bandwidth=link, spread=1.0
            ),
        ),
        seconds=40.0,
        warm_up=15.0,
        detail="requests",
    )


def usual_split(found: Replayed) -> int:
    """Return the split of the largest number of batches."""
    (group,) = found.trainers
    return max(group.splits, key=lambda split: group.splits[split], default=-1)


def scale(tell: Tell) -> list[dict[str, Any]]:
    """Return what ever larger fleets of one kind do, and how long that takes to simulate; at first also finely."""
    rows = []
    for servers, trainers in SCALES:
        fleet = _scale_fleet(servers, trainers)
        # Link rates once in 20 ms: an exact solution at every change is too slow for thousands of transfers.
        coarse = replace(fleet, detail="requests", settle=0.02)
        fine = [fleet] if trainers <= 100 else []
        for one in (*fine, coarse):
            found = replay(one, profiles("resnet18", samples=1 << 20))
            (group,) = found.trainers
            rows.append(
                {
                    "servers": servers,
                    "trainers": trainers,
                    "coarse": one.settle > 0,
                    "samples_per_second": found.samples_per_second,
                    "stalled": group.stalled,
                    "latency": group.latency.to_json(),
                    "wait": found.servers[0].wait.to_json(),
                    "processors": found.servers[0].processors,
                    "changes": group.changes,
                    "wall_seconds": found.wall_seconds,
                }
            )
            tell(f"scale: {servers} servers, {trainers} trainers in {found.wall_seconds:.0f} s")
    return rows


def _scale_fleet(servers: int, trainers: int) -> Fleet:
    return Fleet(
        servers=(ServerGroup(name="servers", count=servers, bandwidth=1e9),),
        trainers=(
            TrainerGroup(
                name="trainers",
                profile=Path("recorded"),
                count=trainers,
                servers=min(servers, 4),
                bandwidth=100e6,
                in_flight=1,
                spread=2.0,
            ),
        ),
        events=(
            FleetEvent(what="fail", name="servers", at=12.0, seconds=4.0, count=max(1, servers // 100)),
            FleetEvent(what="slow", name="servers", at=8.0, count=max(1, servers // 100)),
        )
        if servers > 1
        else (),
        seconds=20.0,
        warm_up=6.0,
    )
