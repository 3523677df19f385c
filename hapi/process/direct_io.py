"""Transfers between memory and open files, past the page cache where a file was opened so: whole, or an error."""

from __future__ import annotations

import errno
import os

from hapi.arrays import Bytes

ALIGNMENT = 4096
"""Bytes; places, lengths and memory of direct transfers are multiples of it."""
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of opening a file with ``O_DIRECT`` on a file system that has no such transfers."""


def aligned(nbytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_whole(descriptor: int, at: int, data: Bytes, *, may_lack: int = 0) -> None:
    """Fill ``data`` from byte ``at``; the file may lack fewer than ``may_lack`` bytes at its end. Raises OSError."""
    view = memoryview(data.data)
    while view:
        moved = os.preadv(descriptor, [view], at)
        if moved <= 0:
            if len(view) < may_lack:
                return
            raise OSError(errno.EIO, "the file is shorter than it was")
        view, at = view[moved:], at + moved


def write_whole(descriptor: int, at: int, data: Bytes) -> None:
    """Write ``data`` to byte ``at``. Raises OSError."""
    view = memoryview(data.data)
    while view:
        moved = os.pwritev(descriptor, [view], at)
        view, at = view[moved:], at + moved
