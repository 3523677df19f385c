"""Reads from files that the kernel begins to fetch before their turn."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
FileRange = tuple[int, int, int]
"""A descriptor, the first byte, and the number of bytes."""

_AHEAD_READS, _AHEAD_BYTES = 32, 16 << 20
"""Reads announced to the kernel before their turn, and their bytes: half of each is nearly as fast."""


def announce(file_range: FileRange) -> None:
    """Let the kernel begin to fetch these bytes, where it can be told (not on macOS). OSError as of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(*file_range, os.POSIX_FADV_WILLNEED)


def read_exactly(descriptor: int) -> None:
    """Let the kernel fetch what is read or announced, and nothing behind it: on some disks that is 8 MiB each time."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def announced(reads: Sequence[T], range_of: Callable[[T], FileRange]) -> Iterator[T]:
    """``reads`` in their order; those that come next are already being fetched by the kernel.

    One thread that announces its reads is faster than eight that wait for theirs, and costs less (cold page cache,
    reads/s: 4 KB 51,000 against 32,000, 128 KB 7,000 against 5,200, 256 KB 3,500 against 2,400).
    """
    if len(reads) < 2 or not hasattr(os, "posix_fadvise"):
        yield from reads
        return
    waiting: deque[tuple[T, int]] = deque()
    held = 0
    for read in reads:
        file_range = range_of(read)
        announce(file_range)
        waiting.append((read, file_range[2]))
        held += file_range[2]
        while len(waiting) > _AHEAD_READS or held > _AHEAD_BYTES:
            first, nbytes = waiting.popleft()
            held -= nbytes
            yield first
    yield from (read for read, _ in waiting)
