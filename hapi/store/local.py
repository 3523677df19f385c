"""A store in a local folder: ``preadv`` straight into the caller's buffer, atomic writes, ``flock`` locks."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from hapi.atomic import clean_partials, mark_in_use, move_to_free, partial_name, sync_folder
from hapi.errors import FULL, ConflictError, HapiError, NoRoomError, NotFoundError, StoreError, shortage
from hapi.paths import user_path
from hapi.process.read_ahead import announce, announced, read_exactly
from hapi.store.base import (
    DOCUMENT_BYTES,
    Names,
    ObjectInfo,
    ObjectStore,
    Range,
    ReadPart,
    Then,
    check_document,
    check_key,
    check_prefix,
    nothing,
)
from hapi.store.locking.lock_objects import FolderLockObjects
from hapi.store.locking.locks import LockObjects
from hapi.store.locking.named_owners import remove_unused
from hapi.store.walk import GONE, files_below
from hapi.waiting import moved

_ABSENT_IN_A_ROW = 4
"""Parts of an object in a row that were not in memory, after which the others are not looked for there."""
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)
"""Linux only."""


class LocalStore(ObjectStore):
    """The folder at ``root``; it is made by the first write."""

    def __init__(self, root: str | Path) -> None:
        self.root = user_path(root, "store").absolute()
        self.url = str(self.root)
        self._prefix = f"{self.url.rstrip('/')}/"

    def ping(self) -> None:
        """Check that the folder exists; :class:`NotFoundError` otherwise."""
        mode = self._mode(self.root, "")
        if stat.S_ISREG(mode):
            raise NotFoundError(f"{self.root} is a file; name the folder of a store")
        if not stat.S_ISDIR(mode):
            raise NotFoundError(
                f"there is no folder {self.root}; check the store's path, or pack a dataset or push a model into it"
            )

    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Read the whole file; see :meth:`hapi.store.base.ObjectStore.get`."""
        try:
            with os.fdopen(self._open(key), "rb") as file:
                check_document(f"{self.url}/{key}", os.fstat(file.fileno()).st_size, max_bytes)
                return file.read()
        except OSError as error:
            raise self._mapped(error, key) from error

    def _open(self, key: str) -> int:
        """A descriptor to read ``key`` with; :class:`StoreError` for what is no file.

        Opening or reading a FIFO waits for somebody who writes, and a device may never end.
        """
        path, flags = self._prefix + check_key(key), os.O_RDONLY | os.O_CLOEXEC
        try:
            # Without O_NONBLOCK the open itself would wait for a FIFO's writer; most files do not know of it.
            descriptor = os.open(path, flags | os.O_NONBLOCK)
        except BlockingIOError:  # a file server has a lease on the file, and has been asked for it just now
            if not stat.S_ISREG(Path(path).stat().st_mode):
                raise
            descriptor = os.open(path, flags)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise StoreError(
            f"{self.url}/{key}: is {_kind(mode)} instead of a file; put the object back in its place"
        )

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """See :meth:`hapi.store.base.ObjectStore.read_many`; files of one name are opened once."""
        groups: dict[str, list[int]] = {}
        for number, part in enumerate(parts):
            groups.setdefault(part.key, []).append(number)
        starts = [part.start for part in parts]
        for key, group in sorted(groups.items()):  # in the disk's order, every object opened once
            group.sort(key=starts.__getitem__)
            try:
                descriptor = self._open(key)
                try:
                    read_exactly(descriptor)
                    self._read_group(descriptor, parts, group, then)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise self._mapped(error, key) from error

    def _read_group(
        self, descriptor: int, parts: Sequence[ReadPart], group: Sequence[int], then: Then
    ) -> None:
        """Read parts of one object: those in memory first; the rest is announced to the kernel before its
        turn.
        """
        absent: list[int] = []
        since_present = 0
        for number in group:
            if since_present < _ABSENT_IN_A_ROW and _read_at_once(descriptor, parts[number]):
                since_present = 0
                then(number)
            else:
                since_present += 1
                absent.append(number)
        for number in announced(absent, lambda n: (descriptor, parts[n].start, parts[n].out.nbytes)):
            self._fill(descriptor, parts[number])
            moved()
            then(number)

    def announce(self, ranges: Sequence[Range]) -> None:
        """Let the kernel fetch these bytes; errors show when they are read."""
        for key, group in groupby(sorted(ranges), key=lambda r: r[0]):
            with suppress(OSError, StoreError):
                descriptor = self._open(key)
                try:
                    for _, start, stop in group:
                        announce((descriptor, start, stop - start))
                finally:
                    os.close(descriptor)

    def _fill(self, descriptor: int, part: ReadPart) -> None:
        out = part.out.cast("B")
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], part.start + done)
            if count == 0:
                raise StoreError(
                    f"{self.url}/{part.key}: ends at byte {part.start + done}, but {part.start}.."
                    f"{part.start + len(out)} was asked for; the object is shorter than it should be"
                )
            done += count

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write ``data`` beside its place and move it there, so that a reader sees all of it or nothing."""
        self._write(key, [memoryview(data)], _replace)

    def put_pieces(self, key: str, size: int, pieces: Iterable[memoryview]) -> None:
        """See :meth:`hapi.store.base.ObjectStore.put_pieces`."""
        self._write(key, pieces, _replace)

    def put_new(self, key: str, data: bytes) -> bool:
        """See :meth:`hapi.store.base.ObjectStore.put_new`."""
        return self._write(key, [memoryview(data)], move_to_free)

    def _write(self, key: str, pieces: Iterable[memoryview], move: Callable[[Path, Path], bool]) -> bool:
        """Write ``pieces`` beside their place and ``move`` the file there; whether it is."""
        path = self.path_of(key)
        with self.mapping(key):
            temporary = path.parent / partial_name(path.name)
            descriptor = self.create(temporary, os.O_WRONLY | os.O_EXCL)
            try:
                mark_in_use(descriptor)
                _write_durably(descriptor, pieces)
                moved = move(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(path.parent)
        return moved

    def mark(self, key: str) -> str | None:
        """Return inode, size and time of the last write."""
        try:
            state = self.path_of(key).stat()
        except OSError as error:
            if error.errno in GONE:
                return None
            raise self._mapped(error, key) from error
        return f"{state.st_ino} {state.st_size} {state.st_mtime_ns}"

    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        """Compare the mark and write, in two steps; the lock's holder alone calls it."""
        if self.mark(key) != mark or (mark is None and not self.put_new(key, data)):
            raise ConflictError(
                f"{self.path_of(key)} was written by another process meanwhile; check what it wrote"
            )
        if mark is not None:
            self.put(key, data)

    def _make_folder(self, folder: Path) -> None:
        """Make ``folder`` and its parents, each entry made durable."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            try:
                new.mkdir(exist_ok=True)
            except FileExistsError:
                raise StoreError(f"{new} is no folder; name another store, or remove it") from None
            sync_folder(new.parent)

    def size(self, key: str) -> int:
        """Return the file's size in bytes."""
        try:
            return self.path_of(key).stat().st_size
        except OSError as error:
            raise self._mapped(error, key) from error

    def exists(self, key: str) -> bool:
        """Return whether there is an object of this key."""
        return stat.S_ISREG(self._mode(self.path_of(key), key))

    def _mode(self, path: Path, key: str) -> int:
        """Mode of ``path`` from ``stat``; 0 when it does not exist."""
        try:
            return path.stat().st_mode
        except OSError as error:
            if error.errno in GONE:
                return 0
            raise self._mapped(error, key) from error

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return every object below ``prefix`` sorted by key, linked folders included; none without a folder."""
        top = str(self.root / check_prefix(prefix)).rstrip("/")
        below = len(str(self.root).rstrip("/")) + 1
        try:
            found = [
                ObjectInfo(path[below:], state.st_size, changed=f"{state.st_mtime_ns} {state.st_ctime_ns}")
                for path, state in files_below(top)
            ]
        except OSError as error:
            raise self._mapped(error, prefix) from error
        return sorted(found, key=lambda info: info.key)

    def list_keys(self, prefix: str) -> Names:
        """Return the keys of the files directly below ``prefix``, sorted."""
        top = self.root / check_prefix(prefix)
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        try:
            with os.scandir(top) as entries:
                return sorted(
                    f"{below}{e.name}" for e in entries if e.is_file() and not e.name.startswith(".")
                )
        except OSError as error:
            if error.errno in GONE:
                return []
            raise self._mapped(error, prefix) from error

    def list_names(self, prefix: str) -> Names:
        """Return the names one level below ``prefix`` that hold objects, sorted."""
        top = self.root / check_prefix(prefix)
        try:
            with os.scandir(top) as entries:
                found = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
            return sorted(name for name in found if _holds_objects(f"{top}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._mapped(error, prefix) from error

    def delete(self, key: str) -> None:
        """Remove the file, and folders that are empty then."""
        path = self.path_of(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise self._mapped(error, key) from error
        self.prune(path.parent)

    def prune(self, folder: Path) -> None:
        """Remove empty folders upwards, as an object store has none."""
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _lock_objects(self, key: str) -> LockObjects:
        return FolderLockObjects(self, key)

    def create(self, path: Path, flags: int) -> int:
        """Open ``path`` after making its folders; another process may be removing an empty one just now."""
        for _ in range(1000):
            try:
                self._make_folder(path.parent)
                return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue
        raise StoreError(f"{path.parent} cannot be made: there can be no folders, or something removes it")

    def open_file(self, key: str) -> int:
        """Return a descriptor of the object's file; see :meth:`hapi.store.base.ObjectStore.open_file`."""
        try:
            return self._open(key)
        except OSError as error:
            raise self._mapped(error, key) from error

    def local_path(self, key: str) -> Path | None:
        """Return the object's path."""
        return self.path_of(key)

    def clean_temporary(self, prefix: str, *, alone: bool = True) -> None:
        """Remove the temporary files of dead writers below ``prefix``."""
        for name, _, _ in os.walk(self.root / check_prefix(prefix), topdown=False):
            folder = Path(name)
            if [*clean_partials(folder, alone=alone), *remove_unused(folder)]:
                self.prune(folder)

    def path_of(self, key: str) -> Path:
        """Return the path of the object of this key."""
        return self.root / check_key(key)

    @contextmanager
    def mapping(self, key: str) -> Iterator[None]:
        """Map the system's errors in the block to Hapi's, about ``key``."""
        try:
            yield
        except OSError as error:
            raise self._mapped(error, key) from error

    def _mapped(self, error: OSError, key: str) -> HapiError:
        where = f"{self.url}/{key}" if key else self.url
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return NotFoundError(f"there is no object {where}")
        if error.errno in (*FULL, errno.EFBIG):
            return NoRoomError(
                f"{where}: cannot be written, {error.strerror}; make room and run the same again"
            )
        if (short := shortage(error)) is not None:
            return short
        return StoreError(f"{where}: {error.strerror or error}")


def _kind(mode: int) -> str:
    """A word for what is no regular file."""
    kinds = (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((word for is_kind, word in kinds if is_kind(mode)), "something else")


def _holds_objects(folder: str) -> bool:
    """Return whether a folder holds an object; killed writers leave empty ones. One that cannot be read does."""
    try:
        return any(True for _ in files_below(folder))
    except OSError:
        return True


def _read_at_once(descriptor: int, part: ReadPart) -> bool:
    """Read the part if it is in memory, and return whether it was: announcing it would cost a tenth of
    reading.
    """
    if _NO_WAIT is None:
        return False
    try:
        return os.preadv(descriptor, [part.out], part.start, _NO_WAIT) == part.out.nbytes
    except OSError:  # not in memory, or this file system cannot tell
        return False


def _replace(temporary: Path, path: Path) -> bool:
    temporary.replace(path)
    return True


def _write_durably(descriptor: int, pieces: Iterable[memoryview]) -> None:
    """Write and sync all of ``pieces``, and close."""
    try:
        for piece in pieces:
            data, done = piece.cast("B"), 0
            while done < len(data):
                done += os.write(descriptor, data[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
