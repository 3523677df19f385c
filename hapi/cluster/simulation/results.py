"""Figures of a simulated fleet: throughput, waits, utilisation, and the splits over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from hapi.cluster.simulation.fleet import Fleet
from hapi.cluster.simulation.network import UNLIMITED, Floats, Network
from hapi.cluster.simulation.server import SimulatedServer
from hapi.cluster.simulation.training.trainer import SimulatedTrainer
from hapi.units import format_bytes, format_duration

Servers = Mapping[str, Sequence[SimulatedServer]]
Trainers = Mapping[str, Sequence[SimulatedTrainer]]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Middle and tail of some seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Return those of ``values``; 0 without any."""
        if not values:
            return cls(p50=0.0, p99=0.0)
        p50, p99 = np.quantile(np.asarray(values), (0.5, 0.99))
        return cls(p50=float(p50), p99=float(p99))

    def to_json(self) -> dict[str, float]:
        """Return both by name."""
        return {"p50": self.p50, "p99": self.p99}

    def __str__(self) -> str:
        """Return both for a person."""
        return f"{format_duration(self.p50)} / {format_duration(self.p99)}"


class Sampler:
    """Counts from the end of the warm-up on, and the splits at some moments."""

    def __init__(
        self, env: simpy.Environment, fleet: Fleet, servers: Servers, trainers: Trainers, network: Network
    ) -> None:
        """Count nothing before :meth:`begin`."""
        self._env, self._fleet, self._network = env, fleet, network
        self._servers, self._trainers = servers, trainers
        self.splits: list[tuple[float, Counter[int]]] = []
        """Seconds, and trainers by the split of their newest batch."""
        self._since = 0.0
        self._cpu: dict[str, float] = {}
        self._device: dict[str, float] = {}
        self._carried: Floats = np.zeros(0)
        self._changes: dict[str, int] = {}

    def begin(self) -> None:
        """Count from now on."""
        self._since = self._env.now
        self._carried = self._network.carried
        for server in self._all_servers():
            self._cpu[server.name], self._device[server.name] = server.processors.used, server.device.busy
            server.waits.clear()
            server.served, server.sent_bytes = 0, 0.0
        for trainer in self._all_trainers():
            trainer.reset()
            self._changes[trainer.name] = trainer.splits.changes
        self.sample()

    def sample(self) -> None:
        """Count the splits of now."""
        found = Counter(trainer.split for trainer in self._all_trainers() if trainer.split >= 0)
        self.splits.append((self._env.now, found))

    @property
    def elapsed(self) -> float:
        """Seconds since the warm-up."""
        return self._env.now - self._since

    def changed(self, trainer: SimulatedTrainer) -> int:
        """Return how often a trainer's split has changed."""
        return trainer.splits.changes - self._changes[trainer.name]

    def utilisation(self, servers: Sequence[SimulatedServer]) -> tuple[float, float]:
        """Return the mean parts of the processors and of the devices of ``servers`` that were busy."""
        seconds = max(self.elapsed, 1e-9)
        cpu = [(s.processors.used - self._cpu[s.name]) / s.processors.cores / seconds for s in servers]
        device = [max(0.0, s.device.busy - self._device[s.name]) / seconds for s in servers]
        return float(np.mean(cpu)), float(np.mean(device))

    def link_use(self) -> list[float]:
        """Return the part of each limited link that was used."""
        seconds, carried, found = max(self.elapsed, 1e-9), self._network.carried, []
        for link in self._network.links:
            capacity = self._network.capacity(link)
            if capacity < UNLIMITED:
                found.append(float((carried[link] - self._carried[link]) / capacity / seconds))
        return found

    def _all_servers(self) -> list[SimulatedServer]:
        return [server for group in self._servers.values() for server in group]

    def _all_trainers(self) -> list[SimulatedTrainer]:
        return [trainer for group in self._trainers.values() for trainer in group]


@dataclass(frozen=True, kw_only=True)
class TrainersReplayed:
    """One group of trainers after the warm-up."""

    name: str
    count: int
    samples: int
    samples_per_second: float
    slowest: float
    """Samples per second of the slowest trainer."""
    stalled: float
    """Share of its time in which the mean trainer waited for a batch."""
    latency: Quantiles
    """Seconds of requests, waits and retries included."""
    requests: int
    retries: int
    extra: int
    """Requests that were sent to a second server, too."""
    nbytes: float
    extra_bytes: float
    """Bytes of second servers' answers that were not taken."""
    changes: int
    """Changes of the split, of all trainers."""
    splits: dict[int, int]
    """Batches by split."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        splits = {str(split): count for split, count in sorted(self.splits.items())}
        return {**vars(self), "latency": self.latency.to_json(), "splits": splits}


@dataclass(frozen=True, kw_only=True)
class ServersReplayed:
    """One group of servers after the warm-up."""

    name: str
    count: int
    requests: int
    wait: Quantiles
    """Seconds for a slot."""
    processors: float
    """Share of the processors that was busy."""
    devices: float
    nbytes: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "wait": self.wait.to_json()}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Result of a replay."""

    seconds: float
    """Simulated, after the warm-up."""
    wall_seconds: float
    trainers: Sequence[TrainersReplayed]
    servers: Sequence[ServersReplayed]
    links: Quantiles
    """Shares of the links' bandwidth that were used: half of the links, and nearly all, used no more."""
    splits: Sequence[tuple[float, dict[int, int]]]
    """Trainers by split, over time."""

    @property
    def samples_per_second(self) -> float:
        """Samples that all trainers trained with."""
        return sum(group.samples_per_second for group in self.trainers)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; all but ``wall_seconds`` is the same for the same seed."""
        return {
            "seconds": self.seconds,
            "wall_seconds": round(self.wall_seconds, 2),
            "samples_per_second": self.samples_per_second,
            "trainers": [group.to_json() for group in self.trainers],
            "servers": [group.to_json() for group in self.servers],
            "links_used": self.links.to_json(),
            "splits": [[at, {str(s): n for s, n in sorted(found.items())}] for at, found in self.splits],
        }

    def lines(self) -> list[str]:
        """Return it for a person."""
        head = f"{'trainers':<14}{'count':>7}{'samples/s':>11}{'slowest':>9}{'stalled':>9}"
        head += f"{'retries':>9}{'hedged':>8}{'changes':>9}"
        found = [
            f"{self.seconds:g} s simulated in {self.wall_seconds:.1f} s: {self.samples_per_second:.1f} samples/s",
            f"{head}  request p50 / p99",
        ]
        found += [
            f"{t.name:<14}{t.count:>7}{t.samples_per_second:>11.1f}{t.slowest:>9.2f}{t.stalled:>9.1%}{t.retries:>9}"
            f"{t.extra:>8}{t.changes:>9}  {t.latency}"
            for t in self.trainers
        ]
        found.append(
            f"{'servers':<14}{'count':>7}{'requests':>11}{'CPU':>9}{'device':>9}{'sent':>18}  slot wait p50 / p99"
        )
        found += [
            f"{s.name:<14}{s.count:>7}{s.requests:>11}{s.processors:>9.1%}{s.devices:>9.1%}"
            f"{format_bytes(round(s.nbytes)):>18}  {s.wait}"
            for s in self.servers
        ]
        found.append(
            f"links used: {self.links.p50:.1%} (half of them at most), {self.links.p99:.1%} (99 % of them)"
        )
        found.append("trainers by split over time:")
        step = max(1, len(self.splits) // 8)
        found += [
            f"  {at:>8.1f} s  " + ", ".join(f"split {split}: {count}" for split, count in sorted(now.items()))
            for at, now in self.splits[::step]
        ]
        return found


def collect(
    sampler: Sampler, fleet: Fleet, servers: Servers, trainers: Trainers, wall_seconds: float
) -> Replayed:
    """Return what the parts of a fleet have counted.

    Args:
        sampler: of the same parts.
        fleet: as described.
        servers: by group.
        trainers: by group.
        wall_seconds: of the simulation itself.
    """
    seconds = sampler.elapsed
    return Replayed(
        seconds=seconds,
        wall_seconds=wall_seconds,
        trainers=[_trainers(name, group, sampler) for name, group in trainers.items()],
        servers=[_servers(name, group, sampler) for name, group in servers.items()],
        links=Quantiles.of(sampler.link_use()),
        splits=[(at, dict(found)) for at, found in sampler.splits],
    )


def _trainers(name: str, group: Sequence[SimulatedTrainer], sampler: Sampler) -> TrainersReplayed:
    counts, seconds = [trainer.counts for trainer in group], max(sampler.elapsed, 1e-9)
    splits: Counter[int] = Counter()
    for each in counts:
        splits.update(each.splits)
    samples = sum(each.samples for each in counts)
    return TrainersReplayed(
        name=name,
        count=len(group),
        samples=samples,
        samples_per_second=samples / seconds,
        slowest=min(each.samples for each in counts) / seconds,
        stalled=sum(trainer.stalled for trainer in group) / seconds / len(group),
        latency=Quantiles.of([value for each in counts for value in each.latencies]),
        requests=sum(each.requests for each in counts),
        retries=sum(each.retries for each in counts),
        extra=sum(each.extra for each in counts),
        nbytes=sum(each.nbytes for each in counts),
        extra_bytes=sum(each.extra_bytes for each in counts),
        changes=sum(sampler.changed(trainer) for trainer in group),
        splits=dict(splits),
    )


def _servers(name: str, group: Sequence[SimulatedServer], sampler: Sampler) -> ServersReplayed:
    processors, devices = sampler.utilisation(group)
    return ServersReplayed(
        name=name,
        count=len(group),
        requests=sum(server.served for server in group),
        wait=Quantiles.of([wait for server in group for wait in server.waits]),
        processors=processors,
        devices=devices,
        nbytes=sum(server.sent_bytes for server in group),
    )
