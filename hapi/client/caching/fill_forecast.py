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
from typing import Any, Protocol

from hapi.arrays import IntArray
from hapi.cache.disk_rates import DiskBacklog, WriterPace
from hapi.client.caching.counts import KeptCounts
from hapi.profiler.reuse.job_cost import LINE_BYTES
from hapi.profiler.stages.pipeline import together

STEPS = 8
"""A forecast is made whenever a further part of this size is kept."""
_NO_WORK = 1e-15
"""Seconds for a byte of a writer that was not measured yet."""
_NOTHING = 1e-3
"""Bytes below which none are left."""
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
    epoch_seconds: float
    """Seconds in which a later epoch brings those that were left out."""
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
    disk: DiskBacklog | None = None
    """Rate of the disk, and the bytes that it has yet to write; None where nothing is known of it."""


def seconds_left(state: FillState) -> float | None:
    """Return the seconds until the last wanted byte is kept; None when there is no end to it."""
    found = _by_the_writer(state)
    never_waits = replace(
        state, pace=WriterPace(state.pace.work, 0.0), segment=2 * state.wanted + 1, in_segment=0.0
    )
    at_work = _by_the_writer(never_waits)
    # Disk and writer work at the same time, and the more nearly they take as long, the more they wait for each other.
    return None if found is None else max(found, together((at_work or 0.0, _by_the_disk(state))))


def _by_the_disk(state: FillState) -> float:
    """The least seconds of the disk, which has to write all but the last segment, for which nobody waits.

    What the page cache takes at once comes later: a writer that has not met the disk yet tells nothing of it.
    """
    if state.disk is None or not state.disk.rate:
        return 0.0
    last = (state.in_segment + state.wanted) % max(1.0, state.segment)
    return max(0.0, state.disk.nbytes + state.wanted - last) / state.disk.rate


def _by_the_writer(state: FillState) -> float | None:
    """The seconds by the writer's pace, and by what the epochs bring."""
    spent = 0.0
    for _ in range(MAX_EPOCHS):
        kept, seconds, waiting = _epoch(state)
        left = state.wanted - kept
        if left <= 1e-9 * state.wanted:
            return spent + seconds
        if kept <= 0 and spent:
            return None
        spent += seconds
        state = replace(
            state,
            wanted=left,
            waiting=min(waiting, left),
            coming=left,
            coming_seconds=state.epoch_seconds,
            in_segment=0.0,
        )
    return None


def _epoch(state: FillState) -> tuple[float, float, float]:
    """Return the bytes that an epoch adds, its seconds until all is kept or until it ends, and what waits then.

    The writer fills a segment with what waits and what comes, as fast as it works or as that comes, then waits for the
    disk; what comes meanwhile waits in the line as far as that goes, and in the next epoch if this one is over.
    """
    seconds = max(state.coming_seconds, 1e-9)
    segment = max(1.0, state.segment)
    wait, works = segment * state.pace.wait, 1 / max(_NO_WORK, state.pace.work)
    # One of the batches is in the writer's hands, of which half was written in the mean.
    most_waits = (max(1, state.line // max(1.0, state.batch)) - 0.5) * state.batch
    at, kept, waiting = 0.0, 0.0, state.waiting
    need = max(0.0, segment - state.in_segment)
    # After the epoch the writer goes on with what is the last that is wanted.
    while at < seconds or kept + waiting >= state.wanted * (1 - 1e-9):
        comes = state.coming / seconds if at < seconds else 0.0
        takes = works if waiting > _NOTHING or comes >= works else comes
        if takes <= 0:  # the epoch has brought all, and the line is empty
            break
        need, waits = min(need, state.wanted - kept), waiting
        step = need / takes
        if takes > comes and waiting > 0:
            step = min(step, waiting / (takes - comes))
        if at < seconds:
            step = min(step, seconds - at)
        at, kept, need = at + step, kept + takes * step, need - takes * step
        waiting = max(0.0, min(max(most_waits, waits), waits + (comes - takes) * step))
        if kept >= state.wanted * (1 - 1e-9):
            return kept, at, 0.0
        if need <= _NOTHING:
            came = comes * min(wait, max(0.0, seconds - at))
            waiting = min(max(most_waits, waiting), waiting + came)
            at += wait
            need = segment
    return kept, max(at, seconds), waiting


class FillForecast:
    """Forecasts of one run. For the training thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin before anything was kept."""
        self._clock = clock
        self._passes: list[KeptCounts] = []
        self._cache: Fills | None = None
        self._began: float | None = None
        """Time of the first features that were offered."""
        self._wanted = 0
        self._full = False
        """True once the cache had no room for more."""
        self._samples = 1
        self._pass_began = self._first_at = self._offered_at = self._epoch_seconds = 0.0
        self._coming = self._offered = self._first = 0
        self._forecasts: list[dict[str, float]] = []

    def begin_pass(self, cache: Fills, counts: KeptCounts, ids: IntArray) -> None:
        """Note that an epoch over training samples ``ids`` begins, whose features come into ``cache``."""
        now = self._clock()
        if self._cache is not cache:  # another cut is another fill
            held = cache.share(ids) * len(ids)
            self._wanted = max(0, int(min(1.0, cache.room(len(ids))) * len(ids) - held))
            self._full = False
            self._cache, self._began, self._passes, self._forecasts = cache, None, [], []
        elif self._offered:
            self._epoch_seconds = self._offered_at - self._pass_began
        if counts not in self._passes:
            self._passes.append(counts)
        self._samples = max(1, len(ids))
        self._coming, self._offered = self._samples - self._kept_before(ids), 0
        self._pass_began = now

    def _kept_before(self, ids: IntArray) -> int:
        return 0 if self._cache is None else round(self._cache.share(ids) * len(ids))

    @property
    def kept(self) -> int:
        """Samples that have come into the cache."""
        return sum(counts.kept for counts in self._passes)

    def offered(self, cache: Fills, samples: int) -> None:
        """Note that features of new samples were computed for ``cache``; makes a forecast if it is time for one."""
        if cache is not self._cache:
            return
        now = self._clock()
        self._full = self._full or not cache.admits
        if self._began is None:
            self._began = self._pass_began
        if not self._offered:  # of which the time tells nothing: a pass has to begin
            self._first_at, self._first = now, samples
        self._offered += samples
        self._offered_at = now
        kept = self.kept
        due = int(STEPS * kept / self._wanted) if self._wanted else STEPS
        if not 1 <= due < STEPS or due <= self._last_step or self._offered == self._first:
            return
        rate_of_coming = (self._offered - self._first) / max(1e-9, now - self._first_at)
        counts, each = self._passes[-1], cache.stored_bytes
        to_come = max(0, self._coming - self._offered)
        segment = max(1, cache.segment_bytes)
        left = seconds_left(
            FillState(
                wanted=(self._wanted - kept) * each,
                waiting=max(0, self._offered - counts.kept - counts.skipped) * each,
                coming=to_come * each,
                coming_seconds=to_come / rate_of_coming,
                epoch_seconds=self._epoch_seconds or self._samples / rate_of_coming,
                batch=samples * each,
                line=LINE_BYTES * each / max(1, cache.sample_bytes),
                pace=cache.writer_pace(),
                segment=segment,
                in_segment=counts.kept * each % segment,
                disk=cache.disk_backlog(),
            )
        )
        if left is not None:
            seconds = now - self._began + left
            self._forecasts.append({"part": due / STEPS, "seconds": round(seconds, 3)})

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
