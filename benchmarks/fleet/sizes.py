"""``benchmarks fleet``, simulated fleets of up to 10,000 trainers: what a demand needs, faults, shared links and herds.

Every trainer knows four servers, drawn by chance. Coarse: a request is one frame, links' rates are found now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet.experiments import (
    HERD_LINK,
    HERD_MODEL,
    HERD_SECONDS,
    HERD_TRAINERS,
    NARROW,
    NARROW_FOR,
    NARROW_FROM,
    Row,
    Rows,
    moved,
    profiles,
    usual_split,
)
from hapi.cluster.simulation.fleet import (
    Event,
    Fleet,
    FleetEvent,
    Reaction,
    ServerGroup,
    SharedLink,
    TrainerGroup,
)
from hapi.cluster.simulation.replay import replay

MODEL, KNOWN = "vgg19", 4
SPEED = 16.0
"""Times as fast as the core of a trainer: a server with an accelerator."""
SERVER_LINK, TRAINER_LINK = 1e9, 100e6
AHEAD = 8 << 20
"""Bytes that a trainer may receive ahead."""
SIZES = (10, 100, 400)
"""Trainers."""
PER_SERVER = (40.0, 20.0, 10.0, 5.0, 2.5)
"""Trainers for each server."""
MIDDLES = {400: 1}
"""Sizes at which so many of the smallest and of the largest numbers of servers are left out."""
FAULT_TRAINERS, FAULT_SERVERS = 200, 40
FAULT_FROM, FAULT_FOR = 20.0, 20.0
_KINDS: tuple[tuple[Event, str], ...] = (("fail", "fail"), ("slow", "ten times as slow"))
FAULTS = {f"{share:.0%} {word}": (what, share) for what, word in _KINDS for share in (0.02, 0.1, 0.3)}
"""Event, and the share of the servers that it happens to."""
_NO_FAULT: tuple[Event, float] = ("fail", 0.0)
RACK_SHARES = (1.0, 0.1, 0.05, 0.02)
"""Bandwidth that a trainer has left on the link that it shares, over its own link's."""
CROWD_MODEL, CROWD_SPEED, CROWD_LINK = HERD_MODEL, 1.0, HERD_LINK / HERD_TRAINERS
"""As in the herd of a few trainers; the link's bits per second are for each trainer."""
CROWD_TRAINERS, CROWD_SERVERS, CROWD_KNOWN = 480, 40, 2
LARGE_TRAINERS, LARGE_SERVERS, LARGE_SECONDS = 10_000, 1000, 24.0
LARGE_SPEED, LARGE_BS, LARGE_SHARE, LARGE_NARROW = 32.0, 256, 0.1, 0.5
"""Speed of a server; samples of a batch; bandwidth that a trainer has left on the link that all share, over its own
link's, and the part of that while it is narrow."""
LARGE_FAULTS = LARGE_SERVERS // 50
"""Servers that fail, and those that become ten times as slow."""
CROWD_REACTIONS: Mapping[str, Reaction] = {
    "both: the client's own": Reaction(),
    "at once": Reaction(hysteresis=0.0, holds=False),
    "both, by chance 1/8": Reaction(follow=0.125),
    "both, averaged rates": Reaction(smoothing=0.2),
}


def sizing() -> Rows:
    """Return what fleets of each size do with ever more servers for each trainer."""
    for trainers in SIZES:
        out = MIDDLES.get(trainers, 0)
        counts = sorted({max(1, round(trainers / each)) for each in PER_SERVER})
        for servers in counts[out : len(counts) - out]:
            yield f"{trainers}/{servers}", partial(_row, _fleet(trainers, servers))


def faults() -> Rows:
    """Return what failures and stragglers cost, in the seconds in which they last."""
    for name, (what, share) in {"none": _NO_FAULT, **FAULTS}.items():
        event = FleetEvent(
            what=what,
            name="servers",
            at=FAULT_FROM,
            seconds=FAULT_FOR,
            count=max(1, int(share * FAULT_SERVERS)),
        )
        fleet = _fleet(
            FAULT_TRAINERS,
            FAULT_SERVERS,
            events=(event,) if share else (),
            warm_up=FAULT_FROM,
            seconds=FAULT_FROM + FAULT_FOR,
        )
        yield name, partial(_row, fleet, name=name)


def racks() -> Rows:
    """Return what a link that all answers share does to all planners."""
    for share in RACK_SHARES:
        link = SharedLink(name="shared", bandwidth=share * TRAINER_LINK * FAULT_TRAINERS)
        yield f"{share:g}", partial(_row, _fleet(FAULT_TRAINERS, FAULT_SERVERS, link=link), share=share)


def crowd() -> Rows:
    """Return what hundreds of planners do when the link that they share is narrow for a while, as the herd does."""
    for name, reaction in CROWD_REACTIONS.items():
        fleet = _fleet(
            CROWD_TRAINERS,
            CROWD_SERVERS,
            link=SharedLink(name="shared", bandwidth=CROWD_LINK * CROWD_TRAINERS),
            events=(_narrow(NARROW_FROM, NARROW_FOR),),
            reaction=reaction,
            speed=CROWD_SPEED,
            known=CROWD_KNOWN,
            in_flight=None,
            seconds=HERD_SECONDS,
        )
        yield name, partial(_row, fleet, CROWD_MODEL, name=name)


def large() -> Rows:
    """Return what a fleet of 10,000 trainers does without faults, and while its link is narrow, servers fail and others
    become slow, all within a third of the time each.
    """
    third = LARGE_SECONDS / 3
    fail = FleetEvent(what="fail", name="servers", at=third, seconds=third, count=LARGE_FAULTS)
    slow = FleetEvent(what="slow", name="servers", at=2 * third, seconds=third, count=LARGE_FAULTS)
    faults = (_narrow(third, third, LARGE_NARROW), fail, slow)
    for name, events in {"none": (), "a narrow link, 2% fail, 2% ten times as slow": faults}.items():
        fleet = _fleet(
            LARGE_TRAINERS,
            LARGE_SERVERS,
            link=SharedLink(name="shared", bandwidth=LARGE_SHARE * TRAINER_LINK * LARGE_TRAINERS),
            events=events,
            speed=LARGE_SPEED,
            bs=LARGE_BS,
            warm_up=third,
            seconds=LARGE_SECONDS,
            settle=0.05,
        )
        yield f"{LARGE_TRAINERS} {name}", partial(_row, fleet, name=name)


def _narrow(since: float, seconds: float, factor: float = NARROW) -> FleetEvent:
    return FleetEvent(what="link", name="shared", at=since, seconds=seconds, factor=factor)


def _fleet(
    trainers: int,
    servers: int,
    *,
    link: SharedLink | None = None,
    events: tuple[FleetEvent, ...] = (),
    reaction: Reaction | None = None,
    speed: float = SPEED,
    known: int = KNOWN,
    in_flight: int | None = 1,
    bs: int | None = None,
    settle: float = 0.02,
    warm_up: float = 15.0,
    seconds: float = 45.0,
) -> Fleet:
    return Fleet(
        servers=(
            ServerGroup(
                name="servers",
                count=servers,
                speed=speed,
                bandwidth=SERVER_LINK,
                link=None if link is None else link.name,
            ),
        ),
        trainers=(
            TrainerGroup(
                name="trainers",
                profile=Path("recorded"),
                count=trainers,
                servers=min(servers, known),
                in_flight=in_flight,
                bs=bs,
                request_size=bs,
                bandwidth=TRAINER_LINK,
                spread=5.0,
            ),
        ),
        links=() if link is None else (link,),
        events=events,
        reaction=reaction or Reaction(),
        seconds=seconds,
        warm_up=warm_up,
        detail="requests",
        settle=settle,
    )


def _row(fleet: Fleet, model: str = MODEL, **named: Any) -> Row:
    found = replay(fleet, profiles(model, samples=1 << 20, ahead=AHEAD))
    (group,), (servers,) = found.trainers, found.servers
    batches = max(1, sum(group.splits.values()))
    return {
        **named,
        "trainers": group.count,
        "servers": servers.count,
        "samples_per_second": found.samples_per_second,
        "slowest": group.slowest,
        "stalled": group.stalled,
        "latency": group.latency.to_json(),
        "wait": servers.wait.to_json(),
        "processors": servers.processors,
        "links": found.links.to_json(),
        "requests": group.requests,
        "retries": group.retries,
        "extra": group.extra,
        "split": usual_split(found),
        "changes_per_100_batches": 100 * group.changes / batches,
        "moved": moved(found.splits),
        "splits": [[round(at, 2), {str(s): n for s, n in sorted(now.items())}] for at, now in found.splits],
        "wall_seconds": round(found.wall_seconds, 1),
    }
