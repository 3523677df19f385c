"""Transfers between memory and open files, past the page cache where a file was opened so: whole, or an error.

Their memory is in huge pages: it is made page by page, and a direct transfer pins it page by page, which would be 512
small ones for each huge one.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np

from hapi.arrays import Bytes

ALIGNMENT = 4096
"""Bytes; places, lengths and memory of direct transfers are multiples of it."""
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of opening a file with ``O_DIRECT`` on a file system that has no such transfers."""
HUGE_PAGE = 2 << 20
"""Bytes."""

_own: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Mapped memory that is this process's alone."""
_left: list[mmap.mmap] = []
"""Maps that a child of a fork does not have; unmapped at the end, they would take what has come to their addresses."""


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


def map_huge(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory that asks for huge pages; its pages come when they are first written.

    Args:
        nbytes: what is used of it; behind the last whole huge page it takes small ones.

    Returns:
        The memory, and the offset at which its first huge page begins.

    Raises:
        OSError: the system refuses.
    """
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = -np.frombuffer(mapped, dtype=np.uint8, count=1).ctypes.data % HUGE_PAGE
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE, base, whole)
    return mapped, base


def huge_memory(nbytes: int) -> Bytes:
    """Return memory of its own, uint8 [nbytes]; the system has it back when nothing uses it."""
    mapped, base = map_huge(nbytes)
    return np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=base)


def transfer_buffer(nbytes: int) -> Bytes:
    """Return memory for direct transfers, uint8 [nbytes], that forked children do not have.

    A fork while a transfer is under way would leave its bytes to one of the two processes, on kernels before 6.3 the
    wrong one.
    """
    mapped, base = map_huge(nbytes)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
        _own.add(mapped)
    return np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=base)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _left.extend(_own))
