"""The sequences that requests named lately, so that one epoch's many requests compute its order once.

A request that names chunk windows tells what the next ones will ask for. Where the windows of all jobs that read just
now fit into the chunk cache together, their chunks are read whole at once, as ``mount`` does for its own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hapi.errors import NotFoundError
from hapi.storage.dataset import Dataset
from hapi.storage.sequence import IntArray, Shuffle
from hapi.wire.sequences import ChunkWindows, SequenceRange

KEPT_BYTES = 256 << 20
"""Of the sequences kept; the last one is kept in any case, at 4 bytes a sample."""
READ_SECONDS = 30.0
"""A job counts as reading for so long after its last request: longer than a batch takes to train on."""

_Key = tuple[int, int, int, int, int]


class Orders:
    """Thread-safe. One sequence is computed at a time: it takes some 40 bytes a sample while it is."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        self._kept: OrderedDict[_Key, npt.NDArray[np.uint32 | np.int64]] = OrderedDict()
        self._reading: dict[tuple[str, ChunkWindows], float] = {}
        """When each job with windows, known by its data set's version and them, asked last."""
        self.computed = 0
        """Sequences computed so far."""

    def find(self, dataset: Dataset, wanted: SequenceRange) -> IntArray:
        """The samples of ``wanted``, int64; :class:`NotFoundError` past the end of the data set."""
        if wanted.stop > dataset.count:
            raise NotFoundError(
                f"stop: data set {dataset.name!r} has {dataset.count} samples, so a sequence of it has no place "
                f"{wanted.stop - 1}"
            )
        key = (dataset.count, wanted.seed, wanted.epoch, wanted.group, wanted.window)
        kept = self._find(key)
        if kept is None:
            with self._computing:
                kept = self._find(key)  # somebody else may have computed it meanwhile
                if kept is None:
                    kept = self._compute(key)
        return kept[wanted.start : wanted.stop].astype(np.int64)

    def _find(self, key: _Key) -> npt.NDArray[np.uint32 | np.int64] | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def _compute(self, key: _Key) -> npt.NDArray[np.uint32 | np.int64]:
        count, seed, epoch, group, window = key
        whole = Shuffle(group, window).sequence(seed, epoch, count)
        kept = whole.astype(np.uint32) if count <= 1 << 32 else whole
        with self._lock:
            self._kept[key] = kept
            self.computed += 1
            while len(self._kept) > 1 and sum(k.nbytes for k in self._kept.values()) > self._kept_bytes:
                self._kept.popitem(last=False)
        return kept

    def near(self, dataset: Dataset, windows: ChunkWindows | None) -> int:
        """How :meth:`hapi.storage.dataset.Dataset.read` is to read for a request from these windows, if any.

        The jobs that read just now share the cache. Trainers of one job have the same windows, in all epochs.
        """
        if windows is None:
            return 0
        now = self._clock()
        with self._lock:
            self._reading[dataset.version, windows] = now
            self._reading = {job: used for job, used in self._reading.items() if used > now - READ_SECONDS}
            sharers = len(self._reading)
        return dataset.reader.near(Shuffle(windows.group, windows.window), sharers)
