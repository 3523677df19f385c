"""Forecast of the time after which a run's cache holds all that it has room for, beside the time that it took.

It is made while the cache fills, from what the run has measured by then: the writer's time for a byte and its waits for
the disk (of the last stretch, so also of the part after a fast one), how fast the training brings new features, and the
disk's own rate, of a probe where the writer did not wait for it yet.
Samples that the writer was too slow for come again in the next epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from hapi.arrays import IntArray
from hapi.cache.disk_rates import DiskBacklog, WriterPace
from hapi.cache.writing.put_rates import WAITED_BYTES
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.filling import GRACE_SECONDS
from hapi.profiler.reuse.job_cost import LINE_BYTES
from hapi.profiler.stages.pipeline import rows_asked

STEPS = 8
"""A forecast is made whenever a further part of this size is kept."""
_NO_WORK = 1e-15
"""Seconds for a byte of a writer that was not measured yet."""
_NOTHING = 1e-3
"""Bytes below which none are left."""
_DONE = 1e-9
"""Part of what is wanted that may be left by rounding."""
_NO_DISK = DiskBacklog(None, 0.0)
MAX_EPOCHS = 1000
"""Epochs after which a fill counts as one that does not end."""


class Fills(Protocol):
    """A cache that is filled."""

    @property
    def admits(self) -> bool:
        """True while there is room."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample."""

    @property
    def stored_bytes(self) -> float:
        """Mean bytes of a sample on the disk."""

    @property
    def segment_bytes(self) -> int:
        """Bytes after which the writer waits for the disk."""

    def share(self, ids: IntArray) -> float:
        """Share of ``ids`` that is held."""

    def room(self, samples: int) -> float:
        """Share of ``samples`` for which there is room."""

    def writer_pace(self) -> WriterPace:
        """Seconds of the writer for a byte on the disk."""

    def disk_backlog(self) -> DiskBacklog:
        """Rate of the disk, and the bytes that it has yet to write."""


@dataclass(frozen=True, kw_only=True)
class FillState:
    """A fill in the middle of an epoch; sizes are bytes on the disk."""

    wanted: float
    """Bytes that are to be kept, and are not."""
    waiting: float
    """Those of them that were computed and wait for the writer."""
    coming: float
    """Those that this epoch still brings."""
    coming_seconds: float
    """Seconds in which it does."""
    coming_after: float = 0.0
    """Seconds before the first of them."""
    begin_seconds: float = 0.0
    """Seconds of a later epoch before its first features come."""
    epoch_seconds: float
    """Seconds of an epoch of which nothing is kept."""
    hits_seconds: float = 0.0
    """Seconds of one of which everything is."""
    whole: float
    """Bytes of all samples of an epoch."""
    rows: int = 1
    """Samples of a batch: one that lacks some is computed."""
    batch: float
    """Bytes of a batch: the line takes whole ones."""
    line: float
    """Bytes that it takes."""
    pace: WriterPace
    """Seconds of the writer for a byte."""
    segment: float
    """Bytes after which the writer waits for the disk; for those after an epoch's last such wait nobody does."""
    in_segment: float
    """Bytes that were written since the last wait."""
    disk: DiskBacklog = _NO_DISK
    """Rate of the disk, and the bytes that it has yet to write."""

    def seconds_of_epoch(self, missing: float) -> float:
        """Seconds of a later epoch, of which this many bytes are not kept."""
        computed = rows_asked(self.rows, min(1.0, missing / max(1.0, self.whole))) / self.rows
        return self.hits_seconds + computed * max(0.0, self.epoch_seconds - self.hits_seconds)


def seconds_left(state: FillState) -> float | None:
    """Return the seconds until the last wanted byte is kept; None when there is no end to it."""
    spent = 0.0
    for _ in range(MAX_EPOCHS):
        found = _drained(state, _epoch(state))
        left = state.wanted - found.kept
        if left <= _DONE * state.wanted:
            return spent + found.seconds
        if found.kept <= 0 and spent:
            return None
        spent += found.seconds
        state = replace(
            state,
            wanted=left,
            waiting=min(found.waiting, left),
            coming=left,
            coming_seconds=state.begin_seconds + state.seconds_of_epoch(left),
            coming_after=state.begin_seconds,
            in_segment=0.0,
            disk=state.disk._replace(nbytes=found.on_its_way),
        )
    return None


class _Epoch(NamedTuple):
    kept: float
    """Bytes that it adds."""
    seconds: float
    """Until all is kept, or until it ends."""
    waiting: float
    """Bytes that wait for the writer then."""
    on_its_way: float
    """Bytes that the disk has not yet."""


def _drained(state: FillState, end: _Epoch) -> _Epoch:
    """Let an epoch's end wait for the line, whose segments are not waited for, unless it would leave a slow disk."""
    rate = state.disk.rate or 0.0
    if WAITED_BYTES * (1 / rate if rate else state.pace.wait) > GRACE_SECONDS:
        return end
    seconds = end.waiting * state.pace.work
    behind = max(0.0, end.on_its_way + end.waiting - rate * seconds)
    return _Epoch(end.kept + end.waiting, end.seconds + seconds, 0.0, behind)


def _epoch(state: FillState) -> _Epoch:
    """Play the rest of an epoch.

    The writer fills a segment with what waits and what comes, as fast as it works or as that comes, while the disk is
    at work on what it has. Then it waits for the disk; what comes meanwhile waits in the line as far as that goes, and
    in the next epoch if this one is over.
    """
    seconds, begins = max(state.coming_seconds, state.coming_after + 1e-9), state.coming_after
    segment, works = max(1.0, state.segment), 1 / max(_NO_WORK, state.pace.work)
    rate, behind = state.disk.rate or 0.0, state.disk.nbytes
    # One of the batches is in the writer's hands, of which half was written in the mean.
    most_waits = (max(1, state.line // max(1.0, state.batch)) - 0.5) * state.batch
    at, kept, waiting = 0.0, 0.0, state.waiting
    need = max(0.0, segment - state.in_segment)
    # After the epoch the writer goes on with what is the last that is wanted.
    while at < seconds or kept + waiting >= state.wanted * (1 - _DONE):
        comes = state.coming / (seconds - begins) if begins <= at < seconds else 0.0
        takes = works if waiting > _NOTHING or comes >= works else comes
        if takes <= 0 and at < begins:
            behind, at = max(0.0, behind - rate * (begins - at)), begins
            continue
        if takes <= 0:  # the epoch has brought all, and the line is empty
            break
        need, waits = min(need, state.wanted - kept), waiting
        step = need / takes
        if takes > comes and waiting > 0:
            step = min(step, waiting / (takes - comes))
        if at < seconds:
            step = min(step, (begins if at < begins else seconds) - at)
        at, kept, need = at + step, kept + takes * step, need - takes * step
        behind = max(0.0, behind + (takes - rate) * step)
        waiting = max(0.0, min(max(most_waits, waits), waits + (comes - takes) * step))
        if kept >= state.wanted * (1 - _DONE):
            return _Epoch(kept, at, 0.0, behind)
        if need <= _NOTHING:
            wait = behind / rate if rate else segment * state.pace.wait
            came = state.coming / (seconds - begins) * max(0.0, min(at + wait, seconds) - max(at, begins))
            waiting = min(max(most_waits, waiting), waiting + came)
            at, behind, need = at + wait, 0.0, segment
    behind = max(0.0, behind - rate * max(0.0, seconds - at))
    return _Epoch(kept, max(at, seconds), waiting, behind)


class _PassRate(NamedTuple):
    """Rate at which a pass brings new features."""

    samples: int
    """Samples that it was measured on."""
    seconds: float
    """Seconds in which it brings all that are not kept."""
    computed: float
    """Part of its samples that is computed, as some of a batch is missing."""


class FillForecast:
    """Forecasts of one run. For the training thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, rows: int = 1, ahead: int = 1) -> None:
        """Begin before anything was kept.

        Args:
            clock: returns seconds.
            rows: samples of a batch.
            ahead: batches that servers are asked for at a time.
        """
        self._clock, self._rows, self._ahead = clock, rows, ahead
        self._passes: list[KeptCounts] = []
        self._cache: Fills | None = None
        self._began: float | None = None
        """Time of the first features that were offered."""
        self._wanted = 0
        self._full = False
        """True once the cache had no room for more."""
        self._samples = 1
        self._pass_began = self._first_at = self._last_at = 0.0
        self._begin_seconds: float | None = None
        """Seconds before the first features of the last pass came; None for the first pass."""
        self._rates: list[_PassRate] = []
        """Those of the passes, the present one last."""
        self._coming = self._offered = self._first = self._all_offered = 0
        self._forecasts: list[dict[str, float]] = []

    def begin_pass(self, cache: Fills, counts: KeptCounts, ids: IntArray) -> None:
        """Note that an epoch over training samples ``ids`` begins, whose features come into ``cache``."""
        now = self._clock()
        if self._cache is not cache:  # another cut is another fill
            held = cache.share(ids) * len(ids)
            self._wanted = max(0, int(min(1.0, cache.room(len(ids))) * len(ids) - held))
            self._full = False
            self._cache, self._began, self._passes, self._forecasts = cache, None, [], []
            self._all_offered, self._begin_seconds, self._rates = 0, None, []
        elif self._offered > self._first:
            self._coming = self._offered  # others came into the cache meanwhile
            self._rates[-1:] = [self._rate()]
        if counts not in self._passes:
            self._passes.append(counts)
        self._samples = max(1, len(ids))
        self._coming, self._offered = self._samples - self._kept_before(ids), 0
        self._pass_began = self._first_at = self._last_at = now
        self._first = 0
        self._rates.append(self._rate())

    def _kept_before(self, ids: IntArray) -> int:
        return 0 if self._cache is None else round(self._cache.share(ids) * len(ids))

    @property
    def kept(self) -> int:
        """Samples that have come into the cache."""
        return sum(counts.kept for counts in self._passes)

    def offered(self, cache: Fills, samples: int, step: float = 0.0) -> None:
        """Note that features of new samples were computed for ``cache``; makes a forecast if it is time for one.

        Args:
            cache: the one that the pass fills.
            samples: their number.
            step: seconds that the training takes for a sample.
        """
        if cache is not self._cache:
            return
        now = self._clock()
        self._full = self._full or not cache.admits
        if self._began is None:
            self._began = self._pass_began
        if not self._offered:  # of which the time tells nothing: a pass has to begin
            self._first_at, self._first = now, samples
            if len(self._passes) > 1:  # the first one waits for servers that begin
                self._begin_seconds = now - self._pass_began
        self._offered += samples
        self._all_offered += samples
        self._last_at = now
        kept = self.kept
        due = int(STEPS * kept / self._wanted) if self._wanted else STEPS
        if not 1 <= due < STEPS or due <= self._last_step or self._offered == self._first:
            return
        left = seconds_left(self._state(cache, samples, step))
        if left is not None:
            seconds = now - self._began + left
            self._forecasts.append({"part": due / STEPS, "seconds": round(seconds, 3)})

    def _all_computed(self, hits: float) -> float:
        """Seconds of an epoch of which nothing is kept, by all passes so far; ``hits``: of one of which everything is.

        Batches of which a part is kept are computed, others take a step alone.
        """
        self._rates[-1:] = [self._rate()]
        samples = sum(one.samples for one in self._rates)
        return sum(
            one.samples * (hits + max(0.0, one.seconds - hits) / one.computed) for one in self._rates
        ) / max(1, samples)

    def _rate(self) -> _PassRate:
        """The rate of the pass so far."""
        samples = self._offered - self._first
        seconds = self._coming * (self._last_at - self._first_at) / max(1, samples)
        computed = rows_asked(self._rows, min(1.0, self._coming / self._samples)) / self._rows
        return _PassRate(samples, seconds, max(1e-9, computed))

    def _state(self, cache: Fills, samples: int, step: float) -> FillState:
        each, segment, whole = cache.stored_bytes, max(1, cache.segment_bytes), self._samples
        to_come, hits = max(0, self._coming - self._offered), step * whole
        settled = sum(counts.kept + counts.skipped + counts.known for counts in self._passes)
        computed = self._all_computed(hits)
        first_ones = self._ahead * computed * self._rows / whole  # servers work on them at the same time
        state = FillState(
            wanted=(self._wanted - self.kept) * each,
            waiting=max(0, self._all_offered - settled) * each,
            coming=to_come * each,
            coming_seconds=0.0,
            begin_seconds=first_ones if self._begin_seconds is None else self._begin_seconds,
            epoch_seconds=computed,
            hits_seconds=min(hits, computed),
            whole=whole * each,
            rows=self._rows,
            batch=samples * each,
            line=LINE_BYTES * each / max(1, cache.sample_bytes),
            pace=cache.writer_pace(),
            segment=segment,
            in_segment=self._passes[-1].kept * each % segment,
            disk=cache.disk_backlog(),
        )
        part = to_come / max(1, self._coming)
        return replace(state, coming_seconds=part * state.seconds_of_epoch(self._coming * each))

    @property
    def _last_step(self) -> int:
        return round(self._forecasts[-1]["part"] * STEPS) if self._forecasts else 0

    def to_json(self) -> dict[str, Any] | None:
        """Return the forecasts by the part that was kept when they were made, and the seconds that it took.

        None before anything was offered; the seconds are None while the cache is not full.
        """
        if self._began is None:
            return None
        ended = [counts.kept_at for counts in self._passes if counts.kept_at is not None]
        full = ended and (self._full or self.kept >= self._wanted)
        return {
            "samples": self._wanted,
            "forecasts": list(self._forecasts),
            "seconds": round(max(ended) - self._began, 3) if full else None,
        }
