"""Sums of what the batches of a split have cost, on this side and at the border to the servers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, Protocol, Self

from hapi.client.loading.link_stats import Forward, SplitTraffic
from hapi.profiler.fit import Tier

Kind = Literal["suffix", "timed", "step"]
"""The main thread's work on a batch: frozen layers after the split, the same timed one by one, the training step."""


@dataclass(frozen=True)
class Work:
    """One kind of the main thread's work."""

    samples: int = 0
    seconds: float = 0.0
    pages: float = 0.0
    """Memory pages that it touched for the first time."""
    layers: tuple[float, ...] = ()
    """Seconds in each of the layers, if they were timed."""

    def plus(self, other: Work, sign: int = 1) -> Work:
        """Return the sum with ``sign`` times ``other``."""
        return Work(
            self.samples + sign * other.samples,
            self.seconds + sign * other.seconds,
            self.pages + sign * other.pages,
            tuple(a + sign * b for a, b in zip_longest(self.layers, other.layers, fillvalue=0.0)),
        )


@dataclass(frozen=True, kw_only=True)
class ClientCounts:
    """This side's own work."""

    batches: int = 0
    samples: int = 0
    """Samples of the batches that were handed out."""
    process_cpu: float = 0.0
    """CPU seconds of all threads."""
    main_cpu: float = 0.0
    """CPU seconds of the main thread while it worked on batches."""
    suffix: Work = Work()
    timed: Work = Work()
    step: Work = Work()

    def plus(self, other: ClientCounts, sign: int = 1) -> ClientCounts:
        """Return the sum with ``sign`` times ``other``."""
        return ClientCounts(
            batches=self.batches + sign * other.batches,
            samples=self.samples + sign * other.samples,
            process_cpu=self.process_cpu + sign * other.process_cpu,
            main_cpu=self.main_cpu + sign * other.main_cpu,
            suffix=self.suffix.plus(other.suffix, sign),
            timed=self.timed.plus(other.timed, sign),
            step=self.step.plus(other.step, sign),
        )


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """Costs of the requests, on the servers and on the way."""

    requests: int = 0
    samples: int = 0
    """Samples that crossed."""
    cached: int = 0
    shared: int = 0
    """Samples that crossed and whose seconds on the server are not known: it had their features, or others computed
    them."""
    keepable: int = 0
    """Samples whose features the servers may have kept when they answered."""
    kept: int = 0
    """Samples whose features they had kept before."""
    bytes_received: int = 0
    receive_cpu: float = 0.0
    decode_cpu: float = 0.0
    server_cpu: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds by stage, as :attr:`server_wall`."""
    server_wall: Mapping[str, float] = field(default_factory=dict)
    work: float = 0.0
    """CPU seconds that the servers accounted to all tenants' requests meanwhile, and the part of other tenants."""
    others: float = 0.0
    process_cpu: float = 0.0
    """CPU seconds of the whole server processes meanwhile."""
    clock: float = 0.0
    """Seconds that the requests ran, by the servers' clocks."""
    span: float = 0.0
    """Seconds from the first request's begin to the last one's end, by each server's clock."""
    cos_batch: int = 0
    """The largest; no sum."""
    request_seconds: float | None = None
    """The least that a request and the head of its answer were on their way; no sum."""

    @classmethod
    def of(cls, share: SplitTraffic) -> Self:
        """Return the counts of one pass's traffic."""
        return cls(
            requests=share.requests,
            samples=share.samples,
            cached=share.cached_samples,
            shared=share.shared_samples,
            keepable=share.keepable_samples,
            kept=share.kept_samples,
            bytes_received=share.bytes_received,
            receive_cpu=share.receive_cpu_seconds,
            decode_cpu=share.decode_cpu_seconds,
            server_cpu=share.server_cpu_seconds,
            server_wall=share.server_wall_seconds,
            work=_length(share.server_work),
            others=share.server_others_seconds,
            process_cpu=_length(share.server_process),
            clock=share.server_clock_seconds,
            span=_length(share.server_span),
            cos_batch=share.cos_batch,
            request_seconds=share.request_seconds,
        )

    def plus(self, other: TrafficCounts) -> TrafficCounts:
        """Return the sum of both."""
        trips = [t for t in (self.request_seconds, other.request_seconds) if t is not None]
        return self._sum(other, 1, max(self.cos_batch, other.cos_batch), min(trips, default=None))

    def minus(self, earlier: TrafficCounts) -> TrafficCounts:
        """Return the difference since ``earlier``; figures that are no sums stay as they are now."""
        return self._sum(earlier, -1, self.cos_batch, self.request_seconds)

    def _sum(self, other: TrafficCounts, sign: int, cos_batch: int, trip: float | None) -> TrafficCounts:
        return TrafficCounts(
            requests=self.requests + sign * other.requests,
            samples=self.samples + sign * other.samples,
            cached=self.cached + sign * other.cached,
            shared=self.shared + sign * other.shared,
            keepable=self.keepable + sign * other.keepable,
            kept=self.kept + sign * other.kept,
            bytes_received=self.bytes_received + sign * other.bytes_received,
            receive_cpu=self.receive_cpu + sign * other.receive_cpu,
            decode_cpu=self.decode_cpu + sign * other.decode_cpu,
            server_cpu=_by_stage(self.server_cpu, other.server_cpu, sign),
            server_wall=_by_stage(self.server_wall, other.server_wall, sign),
            work=self.work + sign * other.work,
            others=self.others + sign * other.others,
            process_cpu=self.process_cpu + sign * other.process_cpu,
            clock=self.clock + sign * other.clock,
            span=self.span + sign * other.span,
            cos_batch=cos_batch,
            request_seconds=trip,
        )


def _by_stage(a: Mapping[str, float], b: Mapping[str, float], sign: int) -> Mapping[str, float]:
    return {stage: a.get(stage, 0.0) + sign * b.get(stage, 0.0) for stage in a.keys() | b.keys()}


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """All costs of the batches of one split."""

    client: ClientCounts = ClientCounts()
    traffic: TrafficCounts = TrafficCounts()

    def __add__(self, other: SplitCounts) -> SplitCounts:
        """Return the sum of both."""
        return SplitCounts(client=self.client.plus(other.client), traffic=self.traffic.plus(other.traffic))

    def __sub__(self, earlier: SplitCounts) -> SplitCounts:
        """Return the difference since ``earlier``."""
        return SplitCounts(
            client=self.client.plus(earlier.client, -1), traffic=self.traffic.minus(earlier.traffic)
        )


Snapshot = Mapping[int, SplitCounts]
"""Sums by split."""


class CostMeter(Protocol):
    """Counts of a run's costs, of which plans are made."""

    @property
    def servers(self) -> Mapping[int, Tier]:
        """Resources of the servers of each split."""

    def snapshot(self, split: int | None = None) -> Snapshot:
        """Return all sums so far, by split; or those of ``split`` alone, if it has any."""

    def take_forwards(self) -> Sequence[Forward]:
        """Return the servers' forward costs for each request answered since the last call."""


def merged(traffic: Snapshot, client: Snapshot) -> Snapshot:
    """Return the sums of the traffic from one snapshot with those of this side's own work from another."""
    nothing = SplitCounts()
    return {
        split: SplitCounts(
            traffic=traffic.get(split, nothing).traffic, client=client.get(split, nothing).client
        )
        for split in traffic.keys() | client.keys()
    }


def _length(spans: Mapping[str, tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans.values())
