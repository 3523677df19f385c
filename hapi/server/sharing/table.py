"""Table of samples under way and of recent ones: equal work of any job is done once.

Features are copied into the table when they are computed, not when they are sent: a slow reader holds up nobody. Recent
ones leave it in the order in which they came, once they are too old or too many. No call waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hapi.arrays import Bytes, Flags, IntArray
from hapi.server.sharing.claims import PendingBatch
from hapi.waiting import Interest

RETENTION_SECONDS = 300.0
"""Seconds for which features are kept at most: jobs of one prefix that run side by side are rarely further apart."""
SAMPLE_BYTES = 256
"""Bytes of the table itself for each sample in it."""
LOOKED_AT = 1024
"""Most samples that are looked at in one search for unclaimed ones."""


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
        self._entries: dict[str, dict[int, PendingBatch | tuple[_Block, int]]] = {}
        self._next: dict[str, int] = {}
        """Sample from which the next search for unclaimed ones begins, by key."""
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
                isinstance(e, PendingBatch) for entries in self._entries.values() for e in entries.values()
            )

    def unclaimed(self, key: str, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are neither recent nor under way; bool [n]."""
        with self._lock:
            entries = self._entries.get(key, {})
            return np.array([i not in entries for i in ids.tolist()], dtype=np.bool_)

    def claim_others(self, key: str, count: int, wanted: int, owner: Interest) -> PendingBatch | None:
        """Claim samples of the dataset that are neither recent nor under way, whoever may want them.

        Args:
            key: identity of the features.
            count: samples of the dataset.
            wanted: most samples to claim.
            owner: of the request that will compute them.

        Returns:
            The claim; None when a bounded search, which goes on where the last one ended, finds none.
        """
        found: list[int] = []
        with self._lock:
            entries, first = self._entries.get(key), self._next.get(key, 0)
            if entries is None:
                return None
            looked = 0
            while looked < min(count, LOOKED_AT) and len(found) < wanted:
                sample = (first + looked) % count
                looked += 1
                if sample not in entries:
                    found.append(sample)
            self._next[key] = (first + looked) % count
            if not found:
                return None
            pending = PendingBatch(np.array(found, dtype=np.int64), owner)
            entries.update(dict.fromkeys(found, pending))
        return pending

    def recent(self, key: str, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are recent; bool [n]."""
        with self._lock:
            entries = self._entries.get(key, {})
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
            entries = self._entries.get(key, {})
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
            entries = self._entries.get(key, {}) if self.max_bytes else {}
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
                    entries = self._entries.setdefault(key, {})
                    for sample in pending.ids.tolist():
                        entries.setdefault(sample, pending)
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
            entries = self._entries.setdefault(key, {})
            for place, sample in enumerate(pending.ids.tolist()):
                if entries.get(sample, pending) is not pending:
                    continue
                if block is None:
                    entries.pop(sample, None)
                else:
                    entries[sample] = block, place
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
        entries = self._entries.get(block.key, {})
        for sample in block.ids.tolist():
            entry = entries.get(sample)
            if isinstance(entry, tuple) and entry[0] is block:
                del entries[sample]
        self._tidy(block.key)

    def _tidy(self, key: str) -> None:
        if key in self._entries and not self._entries[key]:
            del self._entries[key]
            self._next.pop(key, None)
