"""Rows of features in this process's memory: what fits is kept, and nothing is ever replaced.

An epoch uses every sample once in a new order, so that replacing the least recently used row would drop just those
that are needed next. Memory is taken as rows come.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from hapi.arrays import Flags, IntArray, LabelArray
from hapi.process.free_memory import host_free_bytes
from hapi.wire.labels import LabelForm

MAX_DEFAULT_BYTES = 1 << 30
"""Largest default bound."""
_DEFAULT_SHARE = 8
"""The default is this part of the memory that is free."""
Rows = npt.NDArray[np.uint8]


def memory_bound(given: int | None) -> int:
    """Return the bytes of kept features in memory: ``given``, or an eighth of what is free, at most 1 GiB."""
    if given is not None:
        return given
    free = host_free_bytes()
    return MAX_DEFAULT_BYTES if free is None else min(MAX_DEFAULT_BYTES, free // _DEFAULT_SHARE)


class MemoryRows:
    """Features and labels of samples by dense id. Thread-safe; readers never wait."""

    def __init__(self, nbytes: int, count: int, sample_bytes: int, form: LabelForm) -> None:
        """Keep at most ``nbytes`` of the rows of ``count`` samples, of ``sample_bytes`` each and a label."""
        self._lock = threading.Lock()
        capacity = min(count, nbytes // max(1, sample_bytes + form.nbytes))
        try:
            # Pages are taken from the system when they are first written.
            self._features = np.empty((capacity, sample_bytes), dtype=np.uint8)
            self._labels = form.empty(capacity)
        except MemoryError:
            self._features, self._labels = np.empty((0, sample_bytes), dtype=np.uint8), form.empty(0)
        self._slots = np.full(count if len(self._features) else 0, -1, dtype=np.int64)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Most bytes that the rows take."""
        return self._features.nbytes + self._labels.nbytes

    @property
    def full(self) -> bool:
        """True when there is room for no further row."""
        return self._used >= len(self._features)

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are here; bool [n]."""
        if not len(self._slots):
            return np.zeros(len(ids), dtype=np.bool_)
        held: Flags = self._slots[ids] >= 0
        return held

    def read(self, ids: IntArray, features: Rows, labels: LabelArray) -> Flags:
        """Copy the rows of samples that are here into theirs of ``features`` and ``labels``.

        Returns:
            bool [n]: which those are.
        """
        if not len(self._slots):
            return np.zeros(len(ids), dtype=np.bool_)
        slots = self._slots[ids]
        found: Flags = slots >= 0
        if found.all():
            np.take(self._features, slots, axis=0, out=features, mode="clip")
            labels[:] = self._labels[slots]
        elif found.any():
            slots = slots[found]
            features[found] = self._features[slots]
            labels[found] = self._labels[slots]
        return found

    def add(self, ids: IntArray, features: Rows, labels: LabelArray) -> None:
        """Keep rows that are not here yet, as far as there is room.

        Args:
            ids: int64 [n].
            features: uint8 [n, sample_bytes], checked by the caller.
            labels: n of them.
        """
        if self.full:
            return
        with self._lock:
            rows = np.flatnonzero(self._slots[ids] < 0)
            rows = rows[np.sort(np.unique(ids[rows], return_index=True)[1])][
                : len(self._features) - self._used
            ]
            first, stop = self._used, self._used + len(rows)
            np.take(features, rows, axis=0, out=self._features[first:stop], mode="clip")
            self._labels[first:stop] = labels[rows]
            self._used = stop
            self._slots[ids[rows]] = np.arange(
                first, stop
            )  # at last: readers look at nothing that is not there
