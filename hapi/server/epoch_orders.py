"""The sequences of recent requests, so that one epoch's many requests compute its order once.

A request that names chunk windows tells which samples the next ones will ask for. If the windows of all jobs
that read just now fit into the chunk cache together, their chunks are read whole at once, as ``mount`` does
for its own. Clients name their jobs, so names from a tenant cost others little.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.data.dataset import Dataset
from hapi.data.epoch_order import Shuffle
from hapi.data.reading.reader import AccessHint
from hapi.errors import NotFoundError
from hapi.server.scheduling.fair_queue import ANONYMOUS, Tenant
from hapi.wire.sequences import ChunkWindows, SequenceRange

KEPT_BYTES = 256 << 20
"""Bytes of the sequences kept; the last one is kept in any case, at 4 bytes a sample."""
READ_SECONDS = 30.0
"""A job counts as reading for so long after its last request: longer than a batch takes to train on."""
JOBS_FOR_OTHERS = 4
"""Most jobs of one tenant that share the cache in the eyes of another one."""
JOBS_KEPT = 64
"""Jobs of one tenant that are remembered."""

_Key = tuple[int, int, int, int, int]
_Job = tuple[str, int, int, int]
"""A dataset's version and the windows' numbers: trainers of one job have the same, in all epochs."""


@dataclass(frozen=True)
class _KeptOrder:
    """A sequence, and for whom it was computed."""

    sequence: npt.NDArray[np.uint32 | np.int64]
    tenant: Tenant


class EpochOrderCache:
    """Thread-safe. One sequence is computed at a time: it takes some 40 bytes a sample while it is."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        self._kept: OrderedDict[_Key, _KeptOrder] = OrderedDict()
        self._reading: dict[Tenant, OrderedDict[_Job, float]] = {}
        """Time of the last request of each job with windows, the latest at the end."""
        self.computed = 0
        """Sequences computed so far."""

    def find(self, dataset: Dataset, wanted: SequenceRange, tenant: Tenant = ANONYMOUS) -> IntArray:
        """Return the samples of ``wanted``, int64; :class:`NotFoundError` past the end of the dataset."""
        if wanted.stop > dataset.count:
            raise NotFoundError(
                f"stop: dataset {dataset.name!r} has {dataset.count} samples, so a sequence of it has no place "
                f"{wanted.stop - 1}"
            )
        key = (dataset.count, wanted.seed, wanted.epoch, wanted.group, wanted.window)
        kept = self._find(key)
        if kept is None:
            with self._computing:
                kept = self._find(key)  # somebody else may have computed it meanwhile
                if kept is None:
                    kept = self._compute(key, tenant)
        return kept.sequence[wanted.start : wanted.stop].astype(np.int64)

    def _find(self, key: _Key) -> _KeptOrder | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def _compute(self, key: _Key, tenant: Tenant) -> _KeptOrder:
        count, seed, epoch, group, window = key
        whole = Shuffle(group, window).sequence(seed, epoch, count)
        kept = _KeptOrder(whole.astype(np.uint32) if count <= 1 << 32 else whole, tenant)
        with self._lock:
            self._kept[key] = kept
            self.computed += 1
            while len(self._kept) > 1 and self._bytes() > self._kept_bytes:
                del self._kept[self._dispensable(key)]
        return kept

    def _bytes(self) -> int:
        return sum(kept.sequence.nbytes for kept in self._kept.values())

    def _dispensable(self, newest: _Key) -> _Key:
        """The least recently used sequence of the tenant with the most: a tenant that names many pushes out
        its own.
        """
        counts = Counter(kept.tenant for kept in self._kept.values())
        return max((key for key in self._kept if key != newest), key=lambda k: counts[self._kept[k].tenant])

    def access_hint(
        self, dataset: Dataset, windows: ChunkWindows | None, tenant: Tenant = ANONYMOUS
    ) -> AccessHint | None:
        """Return the hint for :meth:`hapi.data.dataset.Dataset.read_at` for a request from these windows, if
        any.

        The jobs that read just now share the cache: the tenant's own, and a few of each other one.
        """
        if windows is None:
            return None
        job = dataset.version, windows.seed, windows.group, windows.window
        now = self._clock()
        with self._lock:
            own = self._reading.setdefault(tenant, OrderedDict())
            own[job] = now
            own.move_to_end(job)
            if len(own) > JOBS_KEPT:
                own.popitem(last=False)
            self._forget(now - READ_SECONDS)
            others = sum(
                min(JOBS_FOR_OTHERS, len(jobs)) for jobs in self._reading.values() if jobs is not own
            )
            sharers = len(own) + others
        shuffle = Shuffle(windows.group, windows.window)
        return dataset.reader.access_hint(shuffle, windows.seed, windows.epoch, sharers)

    def _forget(self, until: float) -> None:
        """Jobs that have not asked since ``until`` do not read any more."""
        for tenant, jobs in list(self._reading.items()):
            while jobs and next(iter(jobs.values())) <= until:
                jobs.popitem(last=False)
            if not jobs:
                del self._reading[tenant]
