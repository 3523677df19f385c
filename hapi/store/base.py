"""The interface of object stores; ``open.py`` chooses one by its URL.

A local folder has a small backend of its own (``local.py``: reads go straight into the caller's buffer),
everything else goes through obstore (``remote.py``). Backends map foreign errors to :class:`StoreError` or
:class:`NotFoundError`; no other module sees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hapi.errors import BadRequestError, DataError
from hapi.process.threads import Threads
from hapi.store.locking.lease import held, may_be_held
from hapi.store.locking.locks import FORCE, Lease, LockObjects

Names = list[str]
DOCUMENT_BYTES = 64 << 20
"""Largest description that is read: a manifest with a million classes has a third of it."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a store: its key and its size in bytes."""

    key: str
    size: int
    changed: str = field(default="", compare=False, kw_only=True)
    """Mark that differs after the object was written again; empty where it is not known."""


Range = tuple[str, int, int]
"""Bytes ``start..stop`` (stop excluded) of an object."""


class ReadPart(NamedTuple):
    """One range to read: ``len(out)`` bytes of object ``key`` from byte ``start`` on, into ``out``."""

    key: str
    start: int
    out: memoryview


Then = Callable[[int], None]
"""Called with the number of each part that has been read."""


def nothing(number: int) -> None:
    """Do nothing; the :data:`Then` of a reader that only wants the bytes."""


@lru_cache(maxsize=4096)
def check_key(key: str) -> str:
    """Return ``key`` if it is well formed: relative, without empty or dotted segments and NUL.

    Segments that begin with a dot are not allowed at all. That covers ``.`` and ``..`` and protects temporary
    files.

    Raises:
        BadRequestError: it is not.
    """
    segments = key.split("/")
    if "\0" in key or "\\" in key or any(not s or s.startswith(".") for s in segments):
        raise BadRequestError(
            f"object key {key[:80]!r} is refused: it must be relative, without empty parts or leading dots"
        )
    return key


def is_key(key: str) -> bool:
    """Return whether :func:`check_key` accepts ``key``; a listing may hold foreign objects under any names."""
    try:
        check_key(key)
    except BadRequestError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` without a trailing slash, checked like a key; empty stands for the whole store."""
    trimmed = prefix.removesuffix("/")
    return check_key(trimmed) if trimmed else ""


def check_document(where: str, size: int, max_bytes: int) -> None:
    """Raise :class:`DataError` naming ``where`` if an object of ``size`` bytes has more than ``max_bytes``."""
    if size > max_bytes:
        raise DataError(
            f"{where}: has more than the {max_bytes} bytes allowed for such an object; it is damaged"
        )


class ObjectStore(ABC):
    """One store at one URL. Every failure is a :class:`StoreError` or a :class:`NotFoundError`.

    Stores may be used from several threads, but not across a fork.
    """

    url: str

    @abstractmethod
    def ping(self) -> None:
        """Return when the store answers; :class:`NotFoundError` when the folder or bucket does not exist."""

    @abstractmethod
    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Return the whole object; :class:`DataError`, before it is in memory, if it has more than ``max_bytes``
        bytes.
        """

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``start`` on: exactly ``len(out)`` of them, or an error."""
        self.read_many([ReadPart(key, start, out)])

    def read_ranges(self, key: str, starts: Sequence[int], stops: Sequence[int]) -> list[memoryview]:
        """Return ranges of one object, in this order.

        Args:
            key: of the object.
            starts: first byte of each, [n].
            stops: end of each, excluded, [n].
        """
        if len(starts) != len(stops) or any(b < a for a, b in zip(starts, stops, strict=True)):
            raise BadRequestError(f"{key}: the ranges' starts and stops do not pair up")
        outs = [memoryview(bytearray(stop - start)) for start, stop in zip(starts, stops, strict=True)]
        self.read_many([ReadPart(key, start, out) for start, out in zip(starts, outs, strict=True)])
        return outs

    @abstractmethod
    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part, of any objects in any order, in the way that is best for this store.

        Args:
            parts: ranges to read, with their buffers.
            then: called with i by the caller's thread once part i is read. A store that fills parts one by
                one calls it before the next one, while the part's bytes are still in the processor's cache.
        """

    def pools(self) -> Sequence[Threads]:
        """Thread pools in which the store works for its callers, for the watch over hung threads."""
        return ()

    def announce(self, ranges: Sequence[Range]) -> None:
        """Announce ranges that are read next, so that the store may begin to fetch them. Never an error."""
        del ranges

    @abstractmethod
    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object atomically: readers see the old object or the whole new one, also after a crash."""

    @abstractmethod
    def put_pieces(self, key: str, size: int, pieces: Iterable[memoryview]) -> None:
        """Write an object as :meth:`put` does, from pieces in their order, few of which are in memory at a time.

        Args:
            key: of the object.
            size: bytes of all pieces.
            pieces: each is used up before the next one is asked for. What it raises ends the write, and no object is
                there.
        """

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> bool:
        """Write a small object unless it exists; return whether the present one was written by this call."""

    @abstractmethod
    def mark(self, key: str) -> str | None:
        """Return a mark of the object's present state, which differs after each write; None without an
        object.
        """

    @abstractmethod
    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        """Write a small object if it is unchanged since ``mark``.

        It is one step where the store can do that, as most can for a new object (``mark`` None), or two.

        Args:
            key: of the object.
            data: its new bytes.
            mark: :meth:`mark` of the present object; None for no object.

        Raises:
            ConflictError: the object was written meanwhile.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the object's size in bytes."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Return whether there is an object of this key."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects under ``prefix`` (whole path segments), at any depth, sorted by key."""

    @abstractmethod
    def list_keys(self, prefix: str) -> Names:
        """Return the keys of the objects directly below ``prefix``, sorted."""

    @abstractmethod
    def list_names(self, prefix: str) -> Names:
        """Return the direct children of ``prefix`` that have objects below them ("directories"), sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object, if it exists."""

    @contextmanager
    def lock(self, key: str, *, force: bool = False, advice: str = FORCE) -> Iterator[Lease]:
        """Hold the lock ``key`` as a lease during the block.

        A lock is taken over when its owner is dead, or showed no sign of life for its lease (``locks.py``). A
        log line says how long that wait may take.

        Args:
            key: the lock's object.
            force: take over at once from an owner that cannot be seen.
            advice: how a person forces it, for the error.

        Raises:
            ConflictError: another writer holds it; the message names the owner.
        """
        with held(self._lock_objects(check_key(key)), key, force=force, advice=advice) as lease:
            yield lease

    def may_be_locked(self, key: str) -> bool:
        """Return whether the lock ``key`` has an owner that is not seen to be dead; nothing is changed."""
        return may_be_held(self._lock_objects(check_key(key)), key)

    @abstractmethod
    def _lock_objects(self, key: str) -> LockObjects:
        """Objects of the lock ``key`` in this store."""

    def local_path(self, key: str) -> Path | None:
        """Return the object's path in the file system; None for a store that is not local."""
        check_key(key)
        return None

    def open_file(self, key: str) -> int | None:
        """Return a descriptor to read the object's file with, which the caller closes; None where there is no file."""
        check_key(key)
        return None

    def distrust(self, key: str, start: int, stop: int) -> bool:
        """Hear that bytes ``start..stop`` of an object, as read from here, are not what they should be.

        Returns True if they came from elsewhere than the store, such as another server: from now on they come from
        the store, and it is worth reading them once more.
        """
        del key, start, stop
        return False

    def clean_temporary(self, prefix: str, *, alone: bool = True) -> None:
        """Remove the files that killed writers left under ``prefix``.

        Args:
            prefix: where to look.
            alone: the caller holds the lock there. False where others write: a file whose writer cannot be seen from
                here then stays for a day.
        """
        check_prefix(prefix)
