"""Counters of one pass over some samples: a training epoch or a validation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from hapi.cache.writing.record_codec import PassTimes
from hapi.client.caching.counts import KeptCounts
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.prefetcher import Batch
from hapi.client.loading.receiver import StageSpan
from hapi.clocks import BusyClock

_NOTHING: AbstractContextManager[None] = nullcontext()


class Timeline:
    """The path of one batch, from the middle of its pass, through the three stages."""

    def __init__(self) -> None:
        self.batch: int | None = None
        self._recording = False
        self._spans: list[StageSpan] = []

    def begin(self, number: int, batches: int, batch: Batch) -> None:
        """Note that batch ``number`` of ``batches`` is handed out; the one in the middle is recorded."""
        self._recording = number == batches // 2
        if self._recording:
            self.batch, self._spans = number, [] if batch.fetched is None else list(batch.fetched.spans)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record work of this side on the batch in a ``with`` block, if it is the one in the middle."""
        return self._timed(name) if self._recording else _NOTHING

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._spans.append(StageSpan("client", name, started, time.monotonic()))

    def to_json(self) -> dict[str, Any] | None:
        """Return its spans in seconds since its first request; None when no batch was recorded."""
        if self.batch is None or not self._spans:
            return None
        zero = min(span.start for span in self._spans)
        spans = [
            {
                "stage": span.stage,
                "name": span.name,
                "start": round(span.start - zero, 6),
                "end": round(span.end - zero, 6),
            }
            for span in sorted(self._spans, key=lambda s: s.start)
        ]
        return {"batch": self.batch, "spans": spans}


@dataclass
class PassReport:
    """Counters of one pass."""

    samples: int = 0
    """Samples handed to the training loop, those in its hands included."""
    seconds: float = 0.0
    stall_seconds: float = 0.0
    """Seconds that the training loop waited for its next batch."""
    step_seconds: float = 0.0
    """Seconds that it had batches in its hands."""
    client: BusyClock = field(default_factory=BusyClock)
    """Seconds in which this side computed: decode, frozen rest, and the training loop's own work."""
    traffic: Traffic = field(default_factory=Traffic)
    splits: dict[int, int] = field(default_factory=dict)
    """Batches that servers were asked for something of, by split."""
    kept: KeptCounts = field(default_factory=KeptCounts)
    timeline: Timeline = field(default_factory=Timeline)
    unfit: int | None = None
    """The split of a batch that is on its way through the frozen layers here."""
    refused: int | None = None
    """The split that a server had no memory for."""

    def handed_out(self, batch: Batch) -> None:
        """Count ``batch``."""
        hits = 0 if batch.kept is None else int(batch.kept.found.sum())
        self.samples += len(batch.ids)
        self.kept.used(hits, len(batch.ids) - hits)
        if batch.fetched is not None:
            split = batch.fetched.job.split
            self.splits[split] = self.splits.get(split, 0) + 1

    def times(self) -> PassTimes:
        """Return the seconds of a sample so far."""
        samples = max(1, self.samples)
        return PassTimes(self.step_seconds / samples, self.seconds / samples)

    @classmethod
    def over(cls, traffic: Traffic) -> Self:
        """Return the counters of a pass whose traffic is ``traffic``."""
        return cls(traffic=traffic, client=traffic.decode)
