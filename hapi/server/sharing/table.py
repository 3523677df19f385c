"""Table of samples under way and of recent ones: equal work of any job is done once.

Features are copied into the table when they are computed, not when they are sent: a slow reader holds up nobody. Recent
ones leave it in the order in which they came, once they are too old or too many. No call waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np

from hapi.arrays import Bytes, Flags, IntArray
from hapi.server.sharing.claims import PendingBatch
from hapi.waiting import Interest

RETENTION_SECONDS = 300.0
"""Seconds for which features are kept at most: jobs of one prefix that run side by side are rarely further apart."""
SAMPLE_BYTES = 256
"""Bytes of the table itself for each sample in it."""
LOOKED_AT = 1 << 14
"""Samples of the dataset that one step of a search for unclaimed ones looks at."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Features of one forward pass."""

    key: str
    ids: IntArray
    features: Bytes
    """uint8 [n, bytes of a sample]."""
    since: float

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + SAMPLE_BYTES * len(self.ids)


class _Shelf:
    """Samples of one key that are recent or under way."""

    def __init__(self) -> None:
        self.entries: dict[int, PendingBatch | tuple[_Block, int]] = {}
        self.next = 0
        """Sample from which the next search for unclaimed ones begins."""
        self._has: Flags | None = None
        """Which samples are here, once somebody has searched for others; bool [samples of the dataset]."""

    def add(self, ids: IntArray, pending: PendingBatch) -> None:
        """Note that ``pending`` has samples ``ids``, but for those that are here."""
        for sample in ids.tolist():
            self.entries.setdefault(sample, pending)
        if self._has is not None:
            self._has[ids] = True

    def remove(self, sample: int) -> None:
        """Forget a sample that is here."""
        del self.entries[sample]
        if self._has is not None:
            self._has[sample] = False

    def absent(self, start: int, stop: int, count: int) -> IntArray:
        """Return the samples from ``start`` to ``stop``, of a dataset of ``count``, that are not here."""
        if self._has is None:
            self._has = np.zeros(count, dtype=np.bool_)
            self._has[list(self.entries)] = True
        return np.flatnonzero(~self._has[start:stop]) + start


@dataclass
class Taken:
    """The work of a request on some samples; rows are places among those asked for."""

    kept: list[int] = field(default_factory=list)
    """Rows that came into the table meanwhile."""
    joined: dict[PendingBatch, list[tuple[int, int]]] = field(default_factory=dict)
    """By claim of another request: (row, place in the claim)."""
    claims: list[tuple[PendingBatch, IntArray]] = field(default_factory=list)
    """Claims of this request, with their rows."""


class SharingTable:
    """Features by key and sample. Thread-safe."""

    def __init__(
        self,
        max_bytes: int,
        max_seconds: float = RETENTION_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty table.

        Args:
            max_bytes: most bytes of recent features; 0: nothing is shared.
            max_seconds: longest time for which they are kept.
            now: a clock.
        """
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._now = now
        self._lock = threading.Lock()
        self._dividing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._shelves: dict[str, _Shelf] = {}
        """By key; none is empty."""
        self._blocks: deque[_Block] = deque()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of recent features now."""
        with self._lock:
            self._expire()
            return self._bytes

    @property
    def under_way(self) -> int:
        """Samples that are being computed."""
        with self._lock:
            return sum(
                isinstance(e, PendingBatch)
                for shelf in self._shelves.values()
                for e in shelf.entries.values()
            )

    def dividing(self, key: str) -> threading.Lock:
        """Return the lock of a key that a request holds while it takes samples and fills up its last pass.

        Otherwise two requests could share out the last samples of a dataset among two passes that both lack some.
        """
        with self._lock:
            return self._dividing.setdefault(key, threading.Lock())

    def unclaimed(self, key: str, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are neither recent nor under way; bool [n]."""
        with self._lock:
            entries = self._entries(key)
            return np.array([i not in entries for i in ids.tolist()], dtype=np.bool_)

    def others(self, key: str, count: int) -> Iterator[IntArray]:
        """Yield samples that are neither recent nor under way, once around the dataset, whoever may want them.

        The search begins where :meth:`take_others` took the last ones. A key of which nothing is here has none.

        Args:
            key: identity of the features.
            count: samples of the dataset.
        """
        with self._lock:
            shelf = self._shelves.get(key)
            start = 0 if shelf is None else shelf.next % count
        steps = [*range(start, count, LOOKED_AT), count]
        steps += [*range(0, start, LOOKED_AT), start] if start else []
        for low, high in pairwise(steps):
            if low >= high:  # from the end back to the beginning
                continue
            with self._lock:
                shelf = self._shelves.get(key)
                if shelf is None or len(shelf.entries) >= count:
                    return
                found = shelf.absent(low, high, count)
            if len(found):
                yield found

    def take_others(self, key: str, ids: IntArray, owner: Interest) -> PendingBatch | None:
        """Claim those of samples ``ids`` that are neither recent nor under way.

        Args:
            key: identity of the features, of which something is here.
            ids: int64 [n], each once.
            owner: of the request that will compute them.

        Returns:
            The claim; None when nothing is left to claim.
        """
        with self._lock:
            shelf = self._shelves.get(key)
            free = ids[[i not in shelf.entries for i in ids.tolist()]] if shelf is not None else ids[:0]
            if shelf is None or not len(free):
                return None
            pending = PendingBatch(free, owner)
            shelf.add(free, pending)
            shelf.next = int(free[-1]) + 1
        return pending

    def recent(self, key: str, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are recent; bool [n]."""
        with self._lock:
            entries = self._entries(key)
            return np.array([isinstance(entries.get(i), tuple) for i in ids.tolist()], dtype=np.bool_)

    def read(self, key: str, ids: IntArray, out: Bytes) -> Flags:
        """Copy recent features into their rows of ``out``, uint8 [n, bytes of a sample].

        Returns:
            bool [n]: True for the rows that were copied.
        """
        found: Flags = np.zeros(len(ids), dtype=np.bool_)
        sources: dict[_Block, tuple[list[int], list[int]]] = {}
        with self._lock:
            self._expire()
            entries = self._entries(key)
            for row, sample in enumerate(ids.tolist()):
                entry = entries.get(sample)
                if isinstance(entry, tuple):
                    rows, places = sources.setdefault(entry[0], ([], []))
                    rows.append(row)
                    places.append(entry[1])
        for block, (rows, places) in sources.items():
            out[rows] = block.features[places]
            found[rows] = True
        return found

    def take(self, key: str, ids: IntArray, owner: Interest, max_samples: int, *, join: bool = True) -> Taken:
        """Divide samples ``ids`` into those that are recent, those under way and those to compute.

        Args:
            key: identity of the features.
            ids: int64 [n], each once.
            owner: of the request, whose claims the rest become.
            max_samples: samples of one claim.
            join: False to compute all of them, whatever others do.
        """
        taken, free = Taken(), list[int]()
        with self._lock:
            entries = self._entries(key) if self.max_bytes else {}
            for row, sample in enumerate(ids.tolist()):
                entry = entries.get(sample)
                if entry is None or not join:
                    free.append(row)
                elif isinstance(entry, tuple):
                    taken.kept.append(row)
                else:
                    place = int(np.flatnonzero(entry.ids == sample)[0])
                    taken.joined.setdefault(entry, []).append((row, place))
            for start in range(0, len(free), max_samples):
                rows = np.array(free[start : start + max_samples], dtype=np.int64)
                pending = PendingBatch(ids[rows], owner)
                taken.claims.append((pending, rows))
                if self.max_bytes:
                    self._shelves.setdefault(key, _Shelf()).add(pending.ids, pending)
        return taken

    def publish(self, key: str, pending: PendingBatch, features: Bytes | None) -> None:
        """End ``pending``, and keep its ``features`` for a while.

        Args:
            key: identity of the features.
            pending: from :meth:`take`.
            features: uint8 [n, bytes of a sample], not changed afterwards; None if they must not be shared.
        """
        block = None if features is None else _Block(key, pending.ids, features, self._now())
        if block is not None and block.nbytes > self.max_bytes:
            block = None
        with self._lock:
            shelf = self._shelves.setdefault(key, _Shelf())
            if block is not None:
                shelf.add(pending.ids, pending)
            for place, sample in enumerate(pending.ids.tolist()):
                if shelf.entries.get(sample) is not pending:
                    continue
                if block is None:
                    shelf.remove(sample)
                else:
                    shelf.entries[sample] = block, place
            if block is not None:
                self._blocks.append(block)
                self._bytes += block.nbytes
            self._expire()
            self._tidy(key)

    def clear(self) -> int:
        """Forget all recent features; return their bytes."""
        with self._lock:
            nbytes = self._bytes
            while self._blocks:
                self._drop_oldest()
            return nbytes

    def _expire(self) -> None:
        oldest = self._now() - self._max_seconds
        while self._blocks and (self._bytes > self.max_bytes or self._blocks[0].since < oldest):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        block = self._blocks.popleft()
        self._bytes -= block.nbytes
        shelf = self._shelves.get(block.key, _Shelf())
        for sample in block.ids.tolist():
            entry = shelf.entries.get(sample)
            if isinstance(entry, tuple) and entry[0] is block:
                shelf.remove(sample)
        self._tidy(block.key)

    def _entries(self, key: str) -> Mapping[int, PendingBatch | tuple[_Block, int]]:
        shelf = self._shelves.get(key)
        return {} if shelf is None else shelf.entries

    def _tidy(self, key: str) -> None:
        if key in self._shelves and not self._shelves[key].entries:
            del self._shelves[key]
