"""A fleet as a small YAML file describes it: servers, trainers, what they share, and what happens to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from hapi.config.settings import load, setting
from hapi.errors import UsageError

MOST_SERVERS, MOST_TRAINERS = 100_000, 1_000_000
_COUNT = 1 << 31

Event = Literal["fail", "slow", "link"]
Detail = Literal["frames", "requests"]


@dataclass(frozen=True, kw_only=True)
class SharedLink:
    """A link that several servers or trainers share."""

    name: str = setting("name of the link")
    bandwidth: float = setting("of all together", unit="bandwidth")


@dataclass(frozen=True, kw_only=True)
class SharedMachine:
    """Processors that servers and trainers share."""

    name: str = setting("name of the machine")
    cores: float = setting("cores' worth of work at a time", above=0)


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """Servers of one kind."""

    name: str = setting("name of the group")
    count: int = setting("servers", default=1, low=1, high=MOST_SERVERS, unit="count")
    speed: float = setting("times as fast as the server of the profiles", default=1.0, above=0, high=1e6)
    bandwidth: float | None = setting(
        "of each one's link (default: no limit)", default=None, unit="bandwidth"
    )
    link: str | None = setting("shared link that its answers cross", default=None)
    machine: str | None = setting("machine whose processors it shares (default: its own)", default=None)
    max_running: int = setting(
        "requests worked on at a time, per device", default=4, low=1, high=4096, unit="count"
    )
    max_queued: int = setting("requests that may wait", default=128, low=0, high=_COUNT, unit="count")


@dataclass(frozen=True, kw_only=True)
class TrainerGroup:
    """Trainers of one kind."""

    name: str = setting("name of the group")
    profile: Path = setting("profile of its job, or the report of a run, relative to the fleet's file")
    count: int = setting("trainers", default=1, low=1, high=MOST_TRAINERS, unit="count")
    speed: float = setting("times as fast as the trainer of the profile", default=1.0, above=0, high=1e6)
    split: int | Literal["auto"] = setting("auto, or a layer's number", default="auto", low=0)
    servers: int | None = setting(
        "servers that each one knows, drawn by chance (default: all)", default=None, low=1
    )
    bandwidth: float | None = setting(
        "of each one's link (default: no limit)", default=None, unit="bandwidth"
    )
    link: str | None = setting("shared link that its answers cross", default=None)
    machine: str | None = setting("machine whose processors it shares (default: its own)", default=None)
    pause: float = setting("waiting that belongs to each training step", default=0.0, low=0, unit="duration")
    bs: int | None = setting("training batch (default: the profile's job)", default=None, low=1, unit="count")
    samples: int | None = setting("samples of an epoch", default=None, low=1, unit="count")
    request_size: int | None = setting("samples of a request", default=None, low=1, unit="count")
    in_flight: int | None = setting("requests at a time to each known server", default=None, low=1)
    cos_batch: int | None = setting("samples of a frame (default: the profile's)", default=None, low=1)
    batches: int | None = setting("batches after which it ends (default: it goes on)", default=None, low=1)
    spread: float = setting("they begin within this time", default=0.0, low=0, unit="duration")


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """A change to some of a group's servers, or to a shared link."""

    what: Event = setting("fail, slow, or link (another bandwidth)")
    name: str = setting("group of servers, or shared link")
    at: float = setting("when it begins", unit="duration")
    seconds: float | None = setting(
        "how long it lasts (default: to the end)", default=None, low=0, unit="duration"
    )
    count: int = setting("servers of the group, the first ones", default=1, low=1, unit="count")
    factor: float = setting("slow: times as long; link: times the bandwidth", default=10.0, above=0)


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """The way in which trainers' planners follow what they observe; the defaults are the client's own."""

    hysteresis: float | None = setting(
        "gain that another split needs (default: 0.05)", default=None, low=0, high=1
    )
    holds: bool = setting("a split stays for some batches, longer if it changes often", default=True)
    smoothing: float = setting("weight of the newest batch in the link's rate", default=1.0, above=0, high=1)
    follow: float = setting("chance, batch by batch, that a due change is made", default=1.0, above=0, high=1)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A whole fleet, and how it is simulated."""

    servers: tuple[ServerGroup, ...] = setting("groups of servers")
    trainers: tuple[TrainerGroup, ...] = setting("groups of trainers")
    links: tuple[SharedLink, ...] = setting("shared links", default=())
    machines: tuple[SharedMachine, ...] = setting("shared machines", default=())
    events: tuple[FleetEvent, ...] = setting("failures, stragglers, links", default=())
    reaction: Reaction = setting("how planners follow what they observe", default=Reaction())
    seconds: float = setting("simulated time", default=120.0, above=0, high=1e9, unit="duration")
    warm_up: float = setting(
        "time at the beginning that is not counted", default=20.0, low=0, unit="duration"
    )
    seed: int = setting("of every chance", default=0, low=0, high=_COUNT)
    tenants: Literal["each", "one"] = setting("each trainer is a tenant, or all are one", default="each")
    detail: Detail = setting("frames, or whole requests as one frame: for large fleets", default="frames")
    settle: float = setting("links' rates are found at most so often; 0: at each change", default=0.0, low=0,
                            unit="duration")  # fmt: skip
    overhead: float = setting("CPU time of a request on the server beside its profile", default=0.0, low=0,
                              unit="duration")  # fmt: skip
    jitter: float = setting("mean delay of an answer's beginning, by chance", default=0.0, low=0,
                            unit="duration")  # fmt: skip
    efficiency: float = setting(
        "part of each link's bandwidth that contents get", default=1.0, above=0, high=1
    )

    def __post_init__(self) -> None:
        """Check what no single setting tells; :class:`UsageError` says which."""
        if not self.servers or not self.trainers:
            raise UsageError("a fleet needs servers and trainers, a group of each at least")
        links, machines = _by_name("links", self.links), _by_name("machines", self.machines)
        groups = _by_name("servers", self.servers)
        trainers = _by_name("trainers", self.trainers)
        for kind, group in [("servers", g) for g in self.servers] + [("trainers", g) for g in self.trainers]:
            _check_known(f"{kind}: {group.name}: link", group.link, links)
            _check_known(f"{kind}: {group.name}: machine", group.machine, machines)
        for event in self.events:
            known: Mapping[str, Any] = links if event.what == "link" else groups
            _check_known(f"events: {event.what}", event.name, known)
            if event.what != "link" and event.count > groups[event.name].count:
                raise UsageError(
                    f"events: {event.what}: count is {event.count}, but {event.name} has {groups[event.name].count}"
                )
        total = sum(group.count for group in self.servers)
        for trainer in trainers.values():
            if trainer.servers is not None and trainer.servers > total:
                raise UsageError(
                    f"trainers: {trainer.name}: servers is {trainer.servers}, but the fleet has {total}"
                )
        if self.warm_up >= self.seconds:
            raise UsageError(f"warm_up is {self.warm_up:g} s, it must be below seconds, {self.seconds:g}")


Named = TypeVar("Named", SharedLink, SharedMachine, ServerGroup, TrainerGroup)


def load_fleet(path: str, overrides: Mapping[str, Any] | None = None) -> Fleet:
    """Read a fleet from a YAML file; profiles' paths are relative to it.

    Args:
        path: of the file.
        overrides: settings from flags, by name.

    Raises:
        ConfigError: an error in the file, with its place.
        UsageError: an error in a flag, or groups that do not fit each other.
    """
    return load(Fleet, path, overrides, flags=False).value


def _by_name(what: str, named: Sequence[Named]) -> dict[str, Named]:
    found: dict[str, Named] = {}
    for one in named:
        if one.name in found:
            raise UsageError(f"{what}: two are called {one.name!r}; give each its own name")
        found[one.name] = one
    return found


def _check_known(where: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in known:
        listed = ", ".join(known) or "none"
        raise UsageError(f"{where}: there is no {name!r}; the fleet has {listed}")
