"""Filling of feature caches behind the training: a thread puts what batches computed, and never holds them up.

While the line to that thread is full (a disk that is slower than the training), more are left out; a later epoch
misses them, computes them again and may keep them then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hapi.arrays import Flags, IntArray, LabelArray
from hapi.cache.feature_key import WireRounding
from hapi.cache.features import FeatureCache
from hapi.cache.writing.line import WriterLine
from hapi.cache.writing.record_codec import PassTimes
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.sources import byte_rows
from hapi.trace import Tracer

FLUSH_SECONDS = 30.0
"""Longest time for which a flush waits for the writer."""
GRACE_SECONDS = 0.25
"""Seconds for which the disk holds up the writer at an epoch's end, from which on it counts as slow."""
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, eq=False)
class ComputedRows:
    """Features of samples that were computed, in memory of their own."""

    ids: IntArray
    features: torch.Tensor
    """[n, ...] at the cut, on the host."""
    labels: LabelArray
    rounding: WireRounding | None = None
    """How they, or those that they were computed from, were rounded on the wire."""


class Filling:
    """Puts features into caches, in a thread of its own. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        """Record the writing with ``tracer``."""
        self._tracer = tracer
        self._line = WriterLine("hapi-cache-filling")
        self.overrun = False
        """True once features were left out because the line was full."""

    def offer(self, cache: FeatureCache, rows: ComputedRows, counts: KeptCounts, times: PassTimes) -> None:
        """Let ``rows`` be put into ``cache``, if there is a place in the line; returns at once."""
        if not self._line.offer(
            rows.features.nbytes, partial(self._put, cache, rows, counts, times, time.monotonic())
        ):
            self.overrun = True
            counts.wrote(0, 0, len(rows.ids))

    def flush(self, caches: Iterable[FeatureCache], *, last: bool = False) -> None:
        """Put what waits and make it available to other processes, unless the disk is far behind.

        The page cache takes it, and the disk writes it in its own time. Where much is on its way there already, the
        line is left as it is: the disk is at work in any case, and the training need not wait for it.

        Args:
            caches: those that were filled.
            last: whether nothing comes after it, so that all is put, or dropped after :data:`FLUSH_SECONDS`.
        """
        filled, deadline = list(caches), time.monotonic() + FLUSH_SECONDS
        puts = [cache.puts for cache in filled]
        with contextlib.ExitStack() as hurried:
            for one in puts:
                hurried.enter_context(one.hurried(sys.maxsize) if last else one.hurried())
            before = sum(one.held_up_seconds for one in puts)
            while not self._line.wait(_LOOK_SECONDS):
                held_up = sum(one.held_up_seconds for one in puts) - before
                if time.monotonic() >= deadline or (not last and held_up > GRACE_SECONDS):
                    return
        for cache in filled:
            cache.flush()

    def drop(self) -> None:
        """Forget what waits."""
        self._line.drop()

    def close(self) -> None:
        """End the thread once it has put what is in its hands; call :meth:`flush` before."""
        self._line.close(FLUSH_SECONDS)

    def _put(
        self,
        cache: FeatureCache,
        computed: ComputedRows,
        counts: KeptCounts,
        times: PassTimes,
        offered_at: float,
    ) -> None:
        rows = finite_rows(computed)
        fresh = ~cache.held(rows.ids)
        with self._tracer.span("keep features", "cache", samples=len(rows.ids)):
            cache.put(rows.ids, byte_rows(rows.features), rows.labels, times, offered_at)
        kept = int((fresh & cache.held(rows.ids)).sum())
        skipped = int(fresh.sum()) - kept + len(computed.ids) - len(rows.ids)
        counts.wrote(kept, kept * cache.sample_bytes, skipped, int((~fresh).sum()))


def finite_rows(rows: ComputedRows) -> ComputedRows:
    """Return ``rows`` without those that hold a value that is infinite or no number."""
    if not rows.features.is_floating_point():
        return rows
    values = rows.features.reshape(len(rows.ids), -1)
    # A sum over anything else is no number or infinite, too. It takes one pass and no memory, other ways several.
    sound = torch.isfinite(values.sum(1, dtype=torch.float32 if values.dtype == torch.float16 else None))
    if not sound.all():  # or finite values are so large that their sum is not
        sound[~sound] = torch.isfinite(values[~sound]).all(1)
    return rows_where(rows, sound.numpy())


def rows_where(rows: ComputedRows, wanted: Flags) -> ComputedRows:
    """Return those of ``rows`` that are ``wanted``, bool [n]."""
    if wanted.all():
        return rows
    which = np.flatnonzero(wanted)
    features = rows.features[torch.from_numpy(which)]
    return replace(rows, ids=rows.ids[which], features=features, labels=rows.labels[which])
