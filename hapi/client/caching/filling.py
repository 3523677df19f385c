"""Filling of feature caches behind the training: a thread puts what batches computed, and never holds them up.

Features wait in a line of bounded size. While the line is full (a disk that is slower than the training), more are
left out; a later epoch misses them, computes them again and may keep them then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hapi.arrays import IntArray, LabelArray
from hapi.cache.features import FeatureCache
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.sources import byte_rows
from hapi.trace import Tracer

LINE_BYTES = 64 << 20
"""Most bytes that wait, unless one batch alone has more."""
FLUSH_SECONDS = 30.0
"""Longest time for which a flush waits for a disk."""


@dataclass(frozen=True, eq=False)
class ComputedRows:
    """Features of samples that were computed, in memory of their own."""

    ids: IntArray
    features: torch.Tensor
    """[n, ...] at the cut, on the host."""
    labels: LabelArray


@dataclass(frozen=True, eq=False)
class _Waiting:
    cache: FeatureCache
    rows: ComputedRows
    counts: KeptCounts


class Filling:
    """Puts features into caches, in a thread of its own that begins with the first ones. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        """Record the writing with ``tracer``."""
        self._tracer = tracer
        self._changed = threading.Condition()
        self._line: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._at_work = self._closed = False
        self._thread: threading.Thread | None = None
        self.overrun = False
        """True once features were left out because the line was full."""

    def offer(self, cache: FeatureCache, rows: ComputedRows, counts: KeptCounts) -> None:
        """Let ``rows`` be put into ``cache``, if there is a place in the line; returns at once."""
        nbytes = rows.features.nbytes
        with self._changed:
            if self._closed:
                return
            if self._waiting_bytes and self._waiting_bytes + nbytes > LINE_BYTES:
                self.overrun = True
                counts.wrote(0, 0, len(rows.ids))
                return
            self._line.append(_Waiting(cache, rows, counts))
            self._waiting_bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hapi-cache-filling", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, caches: Iterable[FeatureCache], seconds: float = FLUSH_SECONDS) -> None:
        """Put what waits and make it available to other processes; returns after ``seconds`` in any case."""
        deadline = time.monotonic() + seconds
        with self._changed:
            done = self._changed.wait_for(
                lambda: not self._line and not self._at_work, max(0.0, deadline - time.monotonic())
            )
        if done:
            for cache in caches:
                cache.flush()

    def drop(self) -> None:
        """Forget what waits."""
        with self._changed:
            self._line.clear()
            self._waiting_bytes = 0

    def close(self) -> None:
        """End the thread once it has put what is in its hands; call :meth:`flush` before."""
        with self._changed:
            self._closed = True
            self._line.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(FLUSH_SECONDS)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._at_work = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                waiting = self._line.popleft()
                self._at_work = True
            try:
                self._put(waiting)
            finally:
                with self._changed:
                    self._waiting_bytes = max(0, self._waiting_bytes - waiting.rows.features.nbytes)
                    self._at_work = False
            del waiting

    def _put(self, waiting: _Waiting) -> None:
        cache, rows = waiting.cache, finite_rows(waiting.rows)
        fresh = ~cache.held(rows.ids)
        with self._tracer.span("keep features", "cache", samples=len(rows.ids)):
            cache.put(rows.ids, byte_rows(rows.features), rows.labels)
        kept = int((fresh & cache.held(rows.ids)).sum())
        skipped = int(fresh.sum()) - kept + len(waiting.rows.ids) - len(rows.ids)
        waiting.counts.wrote(kept, kept * cache.sample_bytes, skipped)


def finite_rows(rows: ComputedRows) -> ComputedRows:
    """Return ``rows`` without those that hold a value that is infinite or no number."""
    if not rows.features.is_floating_point():
        return rows
    sound = torch.isfinite(rows.features.reshape(len(rows.ids), -1)).all(1).numpy()
    if sound.all():
        return rows
    which = np.flatnonzero(sound)
    return ComputedRows(rows.ids[which], rows.features[torch.from_numpy(which)], rows.labels[which])
