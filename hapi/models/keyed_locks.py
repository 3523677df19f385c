"""A lock for each of any number of names, as long as it is in use."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hapi.waiting import holding


@dataclass
class _KeyLock:
    lock: threading.Lock = field(default_factory=threading.Lock)
    wanted: int = 0


class KeyedLocks:
    """Locks by key. Keys come from clients and must not fill the memory, so unused locks are forgotten.

    A lock must not be forgotten sooner: threads that wait for it and threads that come later would work side
    by side.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, _KeyLock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextmanager
    def holding(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of ``key`` inside the block.

        Raises:
            StoreUnavailableError: this thread's work was given up before its turn.
        """
        with self._lock:
            entry = self._locks.setdefault(key, _KeyLock())
            entry.wanted += 1
        try:
            with holding(entry.lock):
                yield
        finally:
            with self._lock:
                entry.wanted -= 1
                if not entry.wanted:
                    del self._locks[key]
