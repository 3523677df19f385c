"""The interface of object stores; ``open.py`` chooses one by its URL.

A local folder has a small backend of its own (``local.py``: reads go straight into the caller's buffer),
everything else goes through obstore (``remote.py``). Foreign errors become :class:`StoreError` or
:class:`NotFoundError` inside the backends; nobody else sees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hapi.errors import BadRequestError, DataError
from hapi.process.threads import Threads
from hapi.store.locking.lease import held
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
    """A mark that is another one after the object was written again; empty where it is not known."""


Range = tuple[str, int, int]
"""Bytes ``start..stop`` (stop excluded) of an object."""


class ReadPart(NamedTuple):
    """One range to read: ``len(out)`` bytes of object ``key`` from byte ``start`` on, into ``out``."""

    key: str
    start: int
    out: memoryview


Then = Callable[[int], None]
"""Told the number of a part that has been read."""


def nothing(number: int) -> None:
    """The :data:`Then` of who only wants the bytes."""


@lru_cache(maxsize=4096)
def check_key(key: str) -> str:
    """``key`` if it is relative, without empty or dotted segments and NUL; else :class:`BadRequestError`.

    Segments that begin with a dot are refused as a whole: that covers ``.`` and ``..`` and keeps the names
    of temporary files out of reach.
    """
    segments = key.split("/")
    if "\0" in key or "\\" in key or any(not s or s.startswith(".") for s in segments):
        raise BadRequestError(
            f"object key {key[:80]!r} is refused: it must be relative, without empty parts or leading dots"
        )
    return key


def is_key(key: str) -> bool:
    """Whether :func:`check_key` takes ``key``; a listing has what others put there, under any names."""
    try:
        check_key(key)
    except BadRequestError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """``prefix`` without a trailing slash, checked like a key; empty stands for the whole store."""
    trimmed = prefix.removesuffix("/")
    return check_key(trimmed) if trimmed else ""


def check_document(where: str, size: int, max_bytes: int) -> None:
    """:class:`DataError` for an object of ``size`` bytes where ``max_bytes`` are expected; ``where`` names it."""
    if size > max_bytes:
        raise DataError(
            f"{where}: has more than the {max_bytes} bytes that are read of such an object; it is damaged"
        )


class ObjectStore(ABC):
    """One store at one URL. Every failure is a :class:`StoreError` or a :class:`NotFoundError`.

    Stores may be used from several threads, but not across a fork.
    """

    url: str

    @abstractmethod
    def ping(self) -> None:
        """Return when the store answers. :class:`NotFoundError` when there is no such folder or bucket."""

    @abstractmethod
    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        """The whole object, if it has at most ``max_bytes`` bytes; else :class:`DataError`, before it is in memory."""

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``start`` on: exactly ``len(out)`` or an error."""
        self.read_many([ReadPart(key, start, out)])

    def read_ranges(self, key: str, starts: Sequence[int], stops: Sequence[int]) -> list[memoryview]:
        """The ranges ``starts[i]..stops[i]`` (stop excluded) of one object, in the order asked for."""
        if len(starts) != len(stops) or any(b < a for a, b in zip(starts, stops, strict=True)):
            raise BadRequestError(f"{key}: the ranges' starts and stops do not pair up")
        outs = [memoryview(bytearray(stop - start)) for start, stop in zip(starts, stops, strict=True)]
        self.read_many([ReadPart(key, start, out) for start, out in zip(starts, outs, strict=True)])
        return outs

    @abstractmethod
    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part, of any objects in any order; the way that is best for this store.

        ``then(i)`` is called, by the caller's thread, once part i is there. Where the store fills parts one by one,
        that is before the next one: the part's bytes are still in the processor's cache.
        """

    def pools(self) -> Sequence[Threads]:
        """Threads in which the store works for its callers, for who watches over threads that hang."""
        return ()

    def announce(self, ranges: Sequence[Range]) -> None:
        """These will be read next: a store that can fetch them meanwhile begins to. Never an error."""
        del ranges

    @abstractmethod
    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object. Atomic: readers see the old object or the whole new one, also after a crash."""

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> bool:
        """Write a small object unless there is one; whether what is there now was written by this call."""

    @abstractmethod
    def mark(self, key: str) -> str | None:
        """A mark of the object as it is now, which is another one once it was written again; None without one."""

    @abstractmethod
    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        """Write a small object if its :meth:`mark` is still ``mark``; else :class:`ConflictError`.

        One step where the store can do it, as most can for what is not there yet (``mark`` None); else two.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of the object in bytes."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects under ``prefix`` (whole path segments), at any depth, sorted by key."""

    @abstractmethod
    def list_keys(self, prefix: str) -> Names:
        """Keys of the objects directly below ``prefix``, sorted."""

    @abstractmethod
    def list_names(self, prefix: str) -> Names:
        """The direct children of ``prefix`` that have objects below them ("directories"), sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; nothing happens when there is none."""

    @contextmanager
    def lock(self, key: str, *, force: bool = False, advice: str = FORCE) -> Iterator[Lease]:
        """Hold the lock ``key`` as a lease; :class:`ConflictError` naming the owner when somebody else does.

        A lock whose owner is dead, or shows no life for its lease (``locks.py``), is taken over; a line of the log
        says for how long that is waited for. ``force`` does not wait; ``advice``: how a person does so, for the error.
        """
        with held(self._lock_objects(check_key(key)), key, force=force, advice=advice) as lease:
            yield lease

    @abstractmethod
    def _lock_objects(self, key: str) -> LockObjects:
        """How this store keeps the objects of the lock ``key``."""

    def local_path(self, key: str) -> Path | None:
        """Where the object lies in the file system; None for a store that is not local."""
        check_key(key)
        return None

    def clean_temporary(self, prefix: str) -> None:
        """Remove what killed writers left under ``prefix``. Only for the holder of the lock there."""
        check_prefix(prefix)
