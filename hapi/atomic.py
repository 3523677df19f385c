"""Files that are there whole or not at all: written beside their place, made durable, and moved there.

    .NAME.BOOT-NAMESPACE-PID-START.RANDOM.partial   being written by that process
    NAME.partial                                    what is there of a long file, for a later process to go on with

Each write removes beforehand what dead writers left in the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hapi.living import ProcessIdentity

PARTIAL_SUFFIX = ".partial"
"""Ends the name of a long file that is not whole yet."""

_PARTIAL = re.compile(r"\..*\.([0-9a-f]{0,32}-\d+-\d+-\d+)\.[0-9a-f]{12}\.partial", re.DOTALL)
_NAME_BYTES = 100
"""Bytes of the target's name in that of its temporary file, which may have 255 in all."""
_SETTLED_SECONDS = 60.0
"""Seconds without a write after which an unlocked file's writer on this machine is not just about to lock it.
"""
_OLD_SECONDS = 24 * 3600.0
"""Seconds without a write after which a writer that cannot be seen from here counts as dead."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


def partial_name(name: str) -> str:
    """Name of a new temporary file of this process, beside the file ``name``."""
    short = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f".{short}.{ProcessIdentity.current().to_text()}.{secrets.token_hex(6)}.partial"


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path``, durably, when the block succeeds; otherwise nothing
    changes.

    Files that killed writers left in the folder are removed first. The folder must exist. Raises OSError, and
    ValueError for a name that no file can have.
    """
    target = Path(path)
    folder = target.absolute().parent
    clean_partials(folder)
    partial = folder / partial_name(target.name)
    try:
        with partial.open("xb") as file:
            mark_in_use(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
        sync_folder(folder)
    finally:
        with suppress(OSError, ValueError):  # a disk that fails now has failed above
            partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all; errors are those of :func:`replacing`."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def growing(path: str | Path) -> Iterator[BinaryIO]:
    """Open ``PATH.partial``, new or as an earlier block left it, for the block to read, shorten and complete.

    It takes the place of ``path``, durably, when the block succeeds. Otherwise it stays, unless it is empty, and
    ``path`` is as it was. One process has it at a time. The folder must exist. Raises OSError.
    """
    target = Path(path)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    file = _opened_alone(partial)
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        partial.replace(target)
        sync_folder(target.absolute().parent)
    except BaseException:
        with suppress(OSError, ValueError):  # a disk that fails now has failed above
            file.flush()
        with suppress(OSError, ValueError):
            if not os.fstat(file.fileno()).st_size:
                partial.unlink()
        raise
    finally:
        with suppress(OSError):
            file.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of such a block for the same folder. Raises BlockingIOError where one is in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _locked(descriptor):
            raise BlockingIOError(errno.EAGAIN, "another process is writing into it")
        yield
    finally:
        os.close(descriptor)


def _opened_alone(partial: Path) -> BinaryIO:
    """The file at ``partial``, locked; :class:`BlockingIOError` when another process has it."""
    while True:
        descriptor = os.open(
            partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileExistsError(errno.EEXIST, f"{partial.name} is there, and no plain file")
            if not _locked(descriptor):
                raise BlockingIOError(errno.EAGAIN, "another process is writing it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), partial.stat()):
                    return os.fdopen(descriptor, "r+b")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner has just made it whole, or removed it


def _locked(descriptor: int) -> bool:
    """Lock an open file; False when another process has it. A file system without locks has no other process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def move_to_free(partial: Path, path: Path) -> bool:
    """Link the file ``partial`` to ``path``, or move it there, unless ``path`` exists; return whether it was
    done.
    """
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:  # the place is taken by an empty file, and then given over
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        partial.replace(path)
    return True


def mark_in_use(descriptor: int) -> None:
    """Lock a temporary file, for other containers of this machine to see that its writer lives."""
    with suppress(OSError):  # not every file system has locks: its age tells then
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, where its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def clean_partials(folder: Path, *, alone: bool = False) -> list[Path]:
    """Remove the temporary files in ``folder`` whose writers are dead; returns which. Never an error.

    A writer is dead when its process is no more (seen from the same process-id namespace), when it has let go of its
    file's lock (on the same machine), or when its file was not written to for a day (from anywhere).

    Args:
        folder: where to look; not below it.
        alone: the caller is known to be the only writer here, so that no age has to be waited for.
    """
    removed = []
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry in entries:
            match = _PARTIAL.fullmatch(entry.name)
            if match is None:
                continue
            path = Path(entry.path)
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False) and _is_left(path, match[1], folder, alone):
                    path.unlink()
                    removed.append(path)
    return removed


def _is_left(path: Path, writer: str, folder: Path, alone: bool) -> bool:
    identity = ProcessIdentity.from_text(writer)
    lives = None if identity is None else identity.lives()
    if lives is not None:
        return not lives
    age = _OLD_SECONDS if alone else _file_clock(folder) - path.stat().st_mtime
    if identity is not None and identity.shares_kernel() and age > _SETTLED_SECONDS:
        return _is_unlocked(path)
    return age >= _OLD_SECONDS


def _file_clock(folder: Path) -> float:
    """Now by the clock that dates the files in ``folder``, which may be another machine's."""
    probe = folder / partial_name("clock")
    try:
        with probe.open("xb") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _is_unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
