"""``benchmarks fleet``, simulated: herds of planners and knees of small fleets.

Profiles are those of the kept sweep (:func:`benchmarks.keep.grid.recorded`), of servers and trainers with a core each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
HERD_MODEL = "resnet18"
HERD_TRAINERS, HERD_SERVERS, HERD_SECONDS, HERD_LINK = 24, 2, 160.0, 200e6
NARROW_FROM, NARROW_FOR, NARROW = 60.0, 50.0, 0.25
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
"""Rows of a part, each with a key unlike all others', made when it is called."""


def profiles(model: str, samples: int = 6400, ahead: int = 256 << 20) -> Profiles:
    """Return the recorded profile of a model for the one group of trainers.

    Args:
        model: of the sweep.
        samples: of an epoch.
        ahead: bytes of batches that a trainer may receive ahead.
    """
    job = Job(bs=BS, samples=samples, request_size=BS, prefetch_bytes=ahead)
    profile = recorded()[model, BS]
    # Samples are stored as the papers have them: float32 tensors, which nobody has to decode.
    stored = replace(profile.samples, stored_bytes=profile.samples.tensor_bytes, encoded=False)
    tiers = (replace(tier, decode_seconds=0.0) for tier in (profile.server_tier, profile.client_tier))
    server, client = tiers
    return {"trainers": (replace(profile, samples=stored, server_tier=server, client_tier=client), job)}


def herd() -> Rows:
    """Let all planners react to one link that all answers share, which becomes narrow for a while.

    Returns:
        A row for each way of reacting, and for each fixed split.
    """
    known = profiles(HERD_MODEL)
    profile, _ = known["trainers"]
    for split in sorted({0, profile.freeze, profile.last_split}):
        name = f"split {split}"
        yield name, partial(_herd_row, name, _herd_fleet(split, Reaction()), known, fixed=True)
    for name, reaction in REACTIONS.items():
        yield name, partial(_herd_row, name, _herd_fleet("auto", reaction), known, fixed=False)


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


def _herd_row(name: str, fleet: Fleet, known: Profiles, *, fixed: bool) -> Row:
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


def knees() -> Rows:
    """Return the throughput of the same trainers over the servers, for each model and link."""
    for model in MODELS:
        for link in SERVER_LINKS:
            yield f"{model}/{link / 1e6:g}", partial(_knee, model, link)


def _knee(model: str, link: float) -> Row:
    known, rates, splits = profiles(model), dict[int, float](), dict[int, int]()
    for count in KNEE_SERVERS:
        found = replay(_knee_fleet(count, link), known)
        rates[count] = found.samples_per_second
        splits[count] = usual_split(found)
    knee = next(count for count in KNEE_SERVERS if rates[count] >= ENOUGH * max(rates.values()))
    return {
        "model": model,
        "link": link,
        "rates": {str(count): rate for count, rate in rates.items()},
        "splits": {str(count): split for count, split in splits.items()},
        "knee": knee,
        "per_trainer": knee / KNEE_TRAINERS,
    }


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
