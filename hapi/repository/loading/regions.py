"""A region of mapped memory, and the free blocks in it."""

from __future__ import annotations

import mmap
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from hapi.arrays import Bytes
from hapi.process.direct_io import map_huge

PAGE = 4096
"""Bytes to which blocks are aligned: a free block can then be given back alone."""


@dataclass
class FreeBlock:
    """Bytes ``start..stop`` of a region without a tensor in them."""

    start: int
    stop: int
    since: float
    """Time at which its youngest part became free (``time.monotonic`` seconds)."""
    pages: int
    """Bytes of it, at most, that hold memory of the system."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.stop - self.start


class Region:
    """Mapped memory that asks for huge pages; its pages come when they are first written."""

    def __init__(self, nbytes: int) -> None:
        """Map ``nbytes``, a multiple of a huge page; OSError when the system refuses."""
        self._mapped, self._base = map_huge(nbytes)
        self.nbytes = nbytes
        self.free = [FreeBlock(0, nbytes, 0.0, 0)]
        """Blocks by position, no two of them adjacent."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is in it."""
        return len(self.free) == 1 and self.free[0].nbytes == self.nbytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory, at most, that nothing uses."""
        return sum(block.pages for block in self.free)

    def view(self, start: int, nbytes: int) -> Bytes:
        """Return the bytes from ``start`` on; they keep the region mapped."""
        return np.frombuffer(self._mapped, dtype=np.uint8, count=nbytes, offset=self._base + start)

    def cut(self, number: int, size: int) -> int:
        """Take ``size`` bytes from the front of free block ``number``; return the first one."""
        block = self.free[number]
        start = block.start
        if block.nbytes == size:
            del self.free[number]
        else:
            block.start += size
            block.pages = max(0, block.pages - size)
        return start

    def put_back(self, start: int, stop: int, now: float) -> None:
        """Make ``start..stop`` free at time ``now``, together with its free neighbours."""
        number = bisect([block.start for block in self.free], start)
        block = FreeBlock(start, stop, now, stop - start)
        if number < len(self.free) and self.free[number].start == stop:
            after = self.free.pop(number)
            block.stop, block.pages = after.stop, block.pages + after.pages
        if number and self.free[number - 1].stop == start:
            before = self.free.pop(number - 1)
            block.start, block.pages = before.start, block.pages + before.pages
            number -= 1
        self.free.insert(number, block)

    def give_back(self, before: float, keep: int) -> int:
        """Give memory that is free since ``before`` or longer back to the system.

        Args:
            before: a time (``time.monotonic`` seconds).
            keep: bytes of it that stay.

        Returns:
            Bytes that stayed.
        """
        kept = 0
        for block in self.free:
            if block.since > before or not block.pages:
                continue
            stay = min(block.pages, keep - kept) // PAGE * PAGE
            if stay < block.pages and hasattr(mmap, "MADV_DONTNEED"):
                self._mapped.madvise(mmap.MADV_DONTNEED, self._base + block.start + stay, block.nbytes - stay)
                block.pages = stay
            kept += stay
        return kept
