"""A store that is another one, but for what a subclass does otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hapi.process.threads import Threads
from hapi.store.base import (
    DOCUMENT_BYTES,
    Names,
    ObjectInfo,
    ObjectStore,
    Range,
    ReadPart,
    Then,
    nothing,
)
from hapi.store.locking.locks import LockObjects


class DelegatingStore(ObjectStore):
    """Hands everything on to ``origin``."""

    def __init__(self, origin: ObjectStore) -> None:
        self.origin = origin
        self.url = origin.url

    def ping(self) -> None:
        """As the origin."""
        self.origin.ping()

    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        """As the origin."""
        return self.origin.get(key, max_bytes)

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """As the origin."""
        self.origin.read_many(parts, then)

    def pools(self) -> Sequence[Threads]:
        """As the origin."""
        return self.origin.pools()

    def announce(self, ranges: Sequence[Range]) -> None:
        """As the origin."""
        self.origin.announce(ranges)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """As the origin."""
        self.origin.put(key, data)

    def put_pieces(self, key: str, size: int, pieces: Iterable[memoryview]) -> None:
        """See :meth:`ObjectStore.put_pieces`."""
        self.origin.put_pieces(key, size, pieces)

    def put_new(self, key: str, data: bytes) -> bool:
        """As the origin."""
        return self.origin.put_new(key, data)

    def mark(self, key: str) -> str | None:
        """As the origin."""
        return self.origin.mark(key)

    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        """As the origin."""
        self.origin.put_over(key, data, mark)

    def size(self, key: str) -> int:
        """As the origin."""
        return self.origin.size(key)

    def exists(self, key: str) -> bool:
        """As the origin."""
        return self.origin.exists(key)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """As the origin."""
        return self.origin.list(prefix)

    def list_keys(self, prefix: str) -> Names:
        """As the origin."""
        return self.origin.list_keys(prefix)

    def list_names(self, prefix: str) -> Names:
        """As the origin."""
        return self.origin.list_names(prefix)

    def delete(self, key: str) -> None:
        """As the origin."""
        self.origin.delete(key)

    def _lock_objects(self, key: str) -> LockObjects:
        return self.origin._lock_objects(key)

    def local_path(self, key: str) -> Path | None:
        """As the origin."""
        return self.origin.local_path(key)

    def open_file(self, key: str) -> int | None:
        """As the origin."""
        return self.origin.open_file(key)

    def distrust(self, key: str, start: int, stop: int) -> bool:
        """As the origin."""
        return self.origin.distrust(key, start, stop)

    def clean_temporary(self, prefix: str, *, alone: bool = True) -> None:
        """As the origin."""
        self.origin.clean_temporary(prefix, alone=alone)
