"""Stores that count what is read, that fail when they are told to, and that die as a kill does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hapi.errors import NoRoomError, StoreError
from hapi.server.providers.delegating import DelegatingStore
from hapi.store.base import DOCUMENT_BYTES, Names, ObjectInfo, ObjectStore, ReadPart, Then, nothing
from hapi.store.local import LocalStore


class CountingStore(LocalStore):
    """A folder that notes what is read: (key, start, stop). Readers can be made to wait, or to fail."""

    def __init__(self, root: str | Path, counted: Callable[[str], bool] = lambda key: True) -> None:
        """``counted``: whether reading an object of this key is noted."""
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.fail: Callable[[], bool] = lambda: False
        """Asked for each counted range before it is read; True makes the call raise ``StoreError``."""
        self.fails_after: int | None = None
        """Parts of one call that are read before it fails."""
        self._counted = counted
        self._counting = threading.Lock()

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        found = [part for part in parts if self._counted(part.key)]
        with self._counting:
            self.ranges += [(part.key, part.start, part.start + part.out.nbytes) for part in found]
        if self.gate is not None:
            self.entered.set()
            assert self.gate.wait(240)
        if any(self.fail() for _ in found):
            raise StoreError("the store is down; start it")
        if self.fails_after is not None:
            super().read_many(parts[: self.fails_after], then)
            raise StoreError("the store went down; start it")
        super().read_many(parts, then)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each range."""
        return [stop - start for _, start, stop in self.ranges]

    @property
    def bytes_read(self) -> int:
        return sum(self.sizes)


class CountingRemote(DelegatingStore):
    """A folder that is read as a remote store is, and counts its requests by kind and the bytes of their answers."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(LocalStore(root))
        self._counting = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Count anew."""
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0

    def _count(self, kind: str, nbytes: int = 0, requests: int = 1) -> None:
        with self._counting:
            self.requests[kind] += requests
            self.bytes_read += nbytes

    def local_path(self, key: str) -> None:
        """As of a store that is elsewhere."""

    def open_file(self, key: str) -> None:
        """As of a store that is elsewhere."""

    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        self._count("get")
        data = super().get(key, max_bytes)
        self._count("get", len(data), 0)
        return data

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        self._count("range", sum(part.out.nbytes for part in parts), len(parts))
        super().read_many(parts, then)

    def size(self, key: str) -> int:
        self._count("head")
        return super().size(key)

    def exists(self, key: str) -> bool:
        self._count("head")
        return super().exists(key)

    def mark(self, key: str) -> str | None:
        self._count("head")
        return super().mark(key)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._count("list")
        return super().list(prefix)

    def list_keys(self, prefix: str) -> Names:
        self._count("list")
        return super().list_keys(prefix)

    def list_names(self, prefix: str) -> Names:
        self._count("list")
        return super().list_names(prefix)


def is_weights(key: str) -> bool:
    """Whether ``key`` is a pack of tensors of pushed models."""
    return key.startswith("repository/packs/")


class Killed(BaseException):
    """Raised in what is killed; not to be caught by anybody."""


class DyingStore:
    """A store that dies at its n-th change, as a kill does: nothing of that change or after it happens."""

    def __init__(self, store: ObjectStore, changes: int) -> None:
        self._store, self._left = store, changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _change(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed

    def put(self, key: str, data: Any) -> None:
        self._change()
        self._store.put(key, data)

    def put_pieces(self, key: str, size: int, pieces: Any) -> None:
        self._change()
        self._store.put_pieces(key, size, pieces)

    def put_new(self, key: str, data: bytes) -> bool:
        self._change()
        return self._store.put_new(key, data)

    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        self._change()
        self._store.put_over(key, data, mark)

    def delete(self, key: str) -> None:
        self._change()
        self._store.delete(key)


class FullStore:
    """A store on a full disk: what it has can be removed, and empty objects be made."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: Any) -> None:
        if len(data):
            raise NoRoomError(f"{key}: no room")
        self._store.put(key, data)

    def put_pieces(self, key: str, size: int, pieces: Any) -> None:
        next(iter(pieces))
        raise NoRoomError(f"{key}: no room for {size} bytes")


def flip(store: ObjectStore, key: str, position: int) -> None:
    """Change one bit of a stored object."""
    data = bytearray(store.get(key))
    data[position] ^= 1
    store.put(key, data)
