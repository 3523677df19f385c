"""One folder's share of the states: a file with two slots, read and written past the page cache."""

from __future__ import annotations

import os
from pathlib import Path

from hapi.arrays import Bytes
from hapi.process.direct_io import NO_DIRECT, read_whole, write_whole
from hapi.process.file_locks import close_own, keep_from_children


class Drive:
    """An open file of states. Errors of its disk come as OSError with the file's name."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open or create the file and take all its bytes from the disk at once.

        Raises:
            OSError: it cannot be written, or the disk has too little room.
        """
        self._path = path
        descriptor, self._direct = _opened(path)
        self._descriptor = keep_from_children(descriptor)
        self._dirty = False
        try:
            if nbytes:
                os.posix_fallocate(self._descriptor, 0, nbytes)
            if os.fstat(self._descriptor).st_size > nbytes:
                os.ftruncate(self._descriptor, nbytes)
        except OSError as error:
            close_own(self._descriptor)
            raise self._named(error) from None

    def read(self, at: int, values: Bytes) -> None:
        """Fill ``values`` from byte ``at``."""
        try:
            read_whole(self._descriptor, at, values)
        except OSError as error:
            raise self._named(error) from None
        if not self._direct:
            os.posix_fadvise(self._descriptor, at, len(values), os.POSIX_FADV_DONTNEED)

    def write(self, at: int, values: Bytes) -> None:
        """Write ``values`` to byte ``at``; durable after :meth:`sync`."""
        try:
            write_whole(self._descriptor, at, values)
        except OSError as error:
            raise self._named(error) from None
        self._dirty = True

    def sync(self) -> None:
        """Make durable what was written."""
        if not self._dirty:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._named(error) from None
        self._dirty = False
        if not self._direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        close_own(self._descriptor)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def _opened(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        return os.open(path, flags, 0o600), False
