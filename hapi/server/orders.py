"""The sequences that requests named lately, so that one epoch's many requests compute its order once.

A request by range tells more than its ids: what the next ones will ask for. Where the windows of all sequences that are
being read fit into the chunk cache together, their chunks are read whole at once, as ``mount`` does for its own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hapi.errors import NotFoundError
from hapi.storage.dataset import Dataset
from hapi.storage.sequence import IntArray, Shuffle
from hapi.wire.sequences import SequenceRange

KEPT_BYTES = 256 << 20
"""Of the sequences kept; the last one is kept in any case, at 4 bytes a sample."""
READ_SECONDS = 30.0
"""A sequence counts as being read for so long after its last request: longer than a batch takes to train on."""

_Key = tuple[int, int, int, int, int]


@dataclass
class _Kept:
    """One sequence, and when it was last asked for."""

    sequence: npt.NDArray[np.uint32 | np.int64]
    used: float
    near: dict[tuple[str, int], int] = field(default_factory=dict)
    """Answers of ``Reader.near``, by data set version and number of sequences that share the cache."""


@dataclass(frozen=True)
class Wanted:
    """What a range stands for."""

    ids: IntArray
    """int64 [n]"""
    near: int
    """For :meth:`hapi.storage.dataset.Dataset.read`."""


class Orders:
    """Thread-safe. One sequence is computed at a time: it takes some 40 bytes a sample while it is."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self.computed = 0
        """Sequences computed so far."""

    def find(self, dataset: Dataset, wanted: SequenceRange) -> Wanted:
        """The samples of ``wanted``; :class:`NotFoundError` past the end of the data set."""
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
        return Wanted(
            kept.sequence[wanted.start : wanted.stop].astype(np.int64),
            self._near(kept, dataset, wanted.group),
        )

    def _find(self, key: _Key) -> _Kept | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                kept.used = self._clock()
            return kept

    def _compute(self, key: _Key) -> _Kept:
        count, seed, epoch, group, window = key
        whole = Shuffle(group, window).sequence(seed, epoch, count)
        kept = _Kept(whole.astype(np.uint32) if count <= 1 << 32 else whole, self._clock())
        with self._lock:
            self._kept[key] = kept
            self.computed += 1
            while (
                len(self._kept) > 1 and sum(k.sequence.nbytes for k in self._kept.values()) > self._kept_bytes
            ):
                self._kept.popitem(last=False)
        return kept

    def _near(self, kept: _Kept, dataset: Dataset, group: int) -> int:
        """Jobs with windows share the cache; one that goes on to its next epoch is one job."""
        with self._lock:
            since = self._clock() - READ_SECONDS
            jobs = {
                (count, seed, *shuffle)
                for (count, seed, _, *shuffle), k in self._kept.items()
                if k.used >= since and shuffle[0]
            }
        sharers = max(1, len(jobs))
        key = (dataset.version, sharers)
        if key not in kept.near:
            kept.near[key] = dataset.reader.near(kept.sequence, group, sharers)
        return kept.near[key]
