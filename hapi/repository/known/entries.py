"""Entries of a remote store's journal that this machine has read: each is written once, at a number of its own.

Entries of pushes have random names. So a journal whose newest known entry is unchanged is the one that was read, and so
are the entries before it. Another one, as after a store was made anew at the same URL, is read from its beginning. What
a collection needs is always read from the store.
"""

from __future__ import annotations

from hapi.errors import NotFoundError
from hapi.repository.known.record_log import KnownRecords, RecordLog
from hapi.store.base import ObjectStore


class KnownEntries(KnownRecords):
    """Data of entries by key; a context manager, which keeps what was added; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        """Look whether the journal is the one that was read."""
        super().__init__(RecordLog.of(store, "journals"))
        newest = max(self._known, default=None)
        if newest is not None and self._log is not None and not _is(store, newest, self._known[newest]):
            self._log.clear()
            self._known = {}

    def find(self, key: str) -> bytes | None:
        """Return the entry at ``key``, if it is known."""
        return self._known.get(key)

    def add(self, key: str, data: bytes) -> None:
        """Keep a sound entry."""
        if key not in self._known:
            self._new[key] = data


def _is(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except NotFoundError:
        return False
