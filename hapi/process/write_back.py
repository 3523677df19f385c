"""Bytes that the kernel begins to bring to the disk before anybody waits for them.

Left alone, it begins after seconds or gigabytes, and the disk stands idle until then.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of ``sync_file_range`` (Linux)."""


def _system_call() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return found


_CALL = _system_call()


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Let the kernel begin to write these bytes, where it can be told; it waits for a disk that has very much to do.

    Errors come when the file is synchronized.
    """
    _sync(descriptor, start, count, _WRITE)


def wait_written(descriptor: int, start: int, count: int) -> None:
    """Wait until the disk was given these bytes, where the kernel tells; at once elsewhere. Nothing is durable then."""
    _sync(descriptor, start, count, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)


def _sync(descriptor: int, start: int, count: int, flags: int) -> None:
    # A count of 0 would mean all that follows.
    if _CALL is not None and count > 0:
        _CALL(ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(count), ctypes.c_uint(flags))
