"""Storage of a lock's objects (``locks.py``): in any store that can create objects, and in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hapi.atomic import mark_in_use, move_to_free, partial_name
from hapi.errors import FULL, NotFoundError
from hapi.store.locking.locks import LockObjects, LockOwner, Seen, beat_key, is_lock_object
from hapi.store.locking.named_owners import add_name, owner_of, remove_unused

if TYPE_CHECKING:
    from hapi.store.base import ObjectStore
    from hapi.store.local import LocalStore

_MAX_BYTES = 64 << 10
"""Most bytes of a lock's object."""
_BEAT_DIGITS = 20


class StoreLockObjects(LockObjects):
    """Objects in a store without locks. Each owner counts its signs of life in an object of its own."""

    forces_the_living = True

    def __init__(self, store: ObjectStore, lock: str) -> None:
        self._store = store
        self._lock = lock
        self.where = f"{store.url}/{lock.rpartition('/')[0]}"

    def create(self, key: str, document: bytes) -> bool:
        """Write the owner's object unless the key is taken; return whether it was written."""
        return self._store.put_new(key, document)

    def read(self, key: str) -> Seen | None:
        """Return the owner's document and its count; None when there is none."""
        document = self._get(key)
        if document is None:
            return None
        beat = self._get(beat_key(self._lock, LockOwner.from_bytes(document).id))
        return Seen(document, beat or b"")

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, _MAX_BYTES)
        except NotFoundError:
            return None

    def renew(self, key: str, owner: str, beat: int) -> None:
        """Write the count into the owner's own object."""
        self._store.put(beat_key(self._lock, owner), str(beat).encode())

    def lives(self, key: str, owner: LockOwner) -> bool | None:
        """Return whether the owner's process lives; None when that cannot be seen from here."""
        return owner.lives()

    def names(self) -> list[str]:
        """Return the keys of all the lock's objects."""
        found = self._store.list_keys(self._lock.rpartition("/")[0])
        return [key for key in found if is_lock_object(key, self._lock)]

    def remove(self, key: str) -> None:
        """Remove an object, if it exists."""
        self._store.delete(key)


class FolderLockObjects(LockObjects):
    """Files of a folder, held with ``flock`` too: the kernel frees it when the owner's process dies.

    ``flock`` counts on the owner's own machine. On a network file system another machine may not see it, and
    relies on the signs of life, which are the last digits of the owner's file. On a full disk the file stays empty: a
    second name says whose it is, and the time of its last change is the sign of life.
    """

    forces_the_living = False

    def __init__(self, store: LocalStore, lock: str) -> None:
        self._store = store
        self._lock = lock
        self._held: dict[str, tuple[int, int]] = {}
        """Open file and length of the document of each object of ours; 0 where there was no room for it."""
        self.where = str(store.path_of(lock).parent)

    def create(self, key: str, document: bytes) -> bool:
        """Write and lock the owner's file unless the key is taken; return whether it was written."""
        path = self._store.path_of(key)
        with self._store.mapping(key):
            partial = path.parent / partial_name(path.name)
            descriptor = self._store.create(partial, os.O_RDWR | os.O_EXCL)
            name: Path | None = None
            created = False
            try:
                mark_in_use(descriptor)
                full = _write(descriptor, document + b"\n" + b"0" * _BEAT_DIGITS)
                if full is not None:
                    name = add_name(partial, LockOwner.from_bytes(document), full)
                created = move_to_free(partial, path)
            finally:
                partial.unlink(missing_ok=True)
                if not created:
                    os.close(descriptor)
                    if name is not None:
                        name.unlink(missing_ok=True)
            if created:
                self._held[key] = (descriptor, len(document) + 1 if name is None else 0)
            return created

    def read(self, key: str) -> Seen | None:
        """Return the owner's document and its count; None when there is none."""
        try:
            document, _, beat = self._store.get(key, _MAX_BYTES).partition(b"\n")
        except NotFoundError:
            return None
        return Seen(document, beat) if document else self._named(key)

    def _named(self, key: str) -> Seen:
        """An empty object, as the second name of its file describes it."""
        found = owner_of(self._store.path_of(key))
        return Seen(b"", b"") if found is None else Seen(found[0].to_bytes(), str(found[1]).encode())

    def renew(self, key: str, owner: str, beat: int) -> None:
        """Write the count over the last digits of the owner's file; an empty one is as old as the sign of life."""
        descriptor, length = self._held[key]
        with self._store.mapping(key):  # in place: it needs no room on a disk that is full
            if length:
                os.pwrite(descriptor, f"{beat:0{_BEAT_DIGITS}}".encode(), length)
            else:
                os.utime(descriptor)
            os.fsync(descriptor)

    def lives(self, key: str, owner: LockOwner) -> bool | None:
        """Return whether the owner's file is still locked or its process lives; None when that cannot be
        seen.
        """
        try:
            descriptor = os.open(self._store.path_of(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return owner.lives()
        try:
            # A shared one: those who only ask are not in each other's way.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return owner.lives()
        finally:
            os.close(descriptor)
        return False if owner.process is not None and owner.process.shares_kernel() else owner.lives()

    def names(self) -> list[str]:
        """Return the keys of all the lock's files."""
        found = self._store.list_keys(self._lock.rpartition("/")[0])
        return [key for key in found if is_lock_object(key, self._lock)]

    def remove(self, key: str) -> None:
        """Remove the file, and free its ``flock`` if it is ours."""
        path = self._store.path_of(key)
        self._store.delete(key)
        if key in self._held:
            os.close(self._held.pop(key)[0])
        if remove_unused(path.parent):
            self._store.prune(path.parent)


def _write(descriptor: int, data: bytes) -> OSError | None:
    """Write a small file, durably; return the error of a disk without room for it, and leave the file empty."""
    try:
        written = os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in FULL:
            raise
        found = error
    else:
        if written == len(data):
            return None
        found = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, 0)
    return found
