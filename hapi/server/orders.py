"""The sequences that requests named lately, so that one epoch's many requests compute its order once."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from hapi.errors import NotFoundError
from hapi.storage.dataset import Dataset
from hapi.storage.sequence import IntArray, Shuffle
from hapi.wire.sequences import SequenceRange

KEPT_BYTES = 256 << 20
"""Of the sequences kept; the last one is kept in any case, at 4 bytes a sample."""

_Key = tuple[int, int, int, int, int]


class Orders:
    """Thread-safe. One sequence is computed at a time: it takes some 40 bytes a sample while it is."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        self._kept: OrderedDict[_Key, npt.NDArray[np.uint32 | np.int64]] = OrderedDict()
        self.computed = 0
        """Sequences computed so far."""

    def ids(self, dataset: Dataset, wanted: SequenceRange) -> IntArray:
        """The sample ids of ``wanted``, int64 [n]; :class:`NotFoundError` past the end of the data set."""
        if wanted.stop > dataset.count:
            raise NotFoundError(
                f"stop: data set {dataset.name!r} has {dataset.count} samples, so a sequence of it has no place "
                f"{wanted.stop - 1}"
            )
        key = (dataset.count, wanted.seed, wanted.epoch, wanted.group, wanted.window)
        sequence = self._find(key)
        if sequence is None:
            with self._computing:
                sequence = self._find(key)  # somebody else may have computed it meanwhile
                if sequence is None:
                    sequence = self._compute(key)
        return sequence[wanted.start : wanted.stop].astype(np.int64)

    def _find(self, key: _Key) -> npt.NDArray[np.uint32 | np.int64] | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _compute(self, key: _Key) -> npt.NDArray[np.uint32 | np.int64]:
        count, seed, epoch, group, window = key
        whole = Shuffle(group, window).sequence(seed, epoch, count)
        sequence = whole.astype(np.uint32) if count <= 1 << 32 else whole
        with self._lock:
            self._kept[key] = sequence
            self.computed += 1
            while len(self._kept) > 1 and sum(s.nbytes for s in self._kept.values()) > self._kept_bytes:
                self._kept.popitem(last=False)
        return sequence
