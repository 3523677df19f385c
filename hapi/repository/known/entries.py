"""Entries of a remote store's journal that this machine has read: each is written once, at a number of its own.

Entries of pushes have random names. So a journal whose newest known entry is unchanged is the one that was read, and so
are the entries before it. Another one, as after a store was made anew at the same URL, is read from its beginning. What
a collection needs is always read from the store.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from hapi.errors import NotFoundError
from hapi.repository.known.record_log import RecordLog
from hapi.store.base import ObjectStore


class KnownEntries:
    """Data of entries by key; a context manager, which keeps what was added; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        """Look whether the journal is the one that was read."""
        self._log = RecordLog.of(store, "journals")
        self._known = {} if self._log is None else self._log.read()
        self._new: dict[str, bytes] = {}
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.append(self._new)


def _is(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except NotFoundError:
        return False
