"""Memory that a training frees: given back to the system at once, or kept for the tensors that come next."""

from __future__ import annotations

from hapi.allocator import (
    bytes_in_use,
    give_back_freed_memory,
    give_back_large_blocks,
    keep_all_blocks,
    keep_large_blocks,
)
from hapi.process.free_memory import anonymous_bytes

_EXCESSES = 3
"""So many passes one after the other that leave far more than may be kept end the keeping."""
_FAR_MORE = 1.5
"""Freed memory over what may be kept, from which a pass is such a one. Giving all back at the end of a pass costs a
quarter of the page faults, or less, of giving back each block."""


class FreedMemory:
    """Lets a process keep as much freed memory as a pass will use.

    A block that is given back costs a page fault for each page when the next tensor takes its place. A block that is
    kept costs its memory. At the end of a forward pass nearly all memory that a pass takes is in use; what its backward
    pass takes further is known. Freed memory beyond that would be more than a pass needs at any time. A heap whose free
    blocks are too small for the next tensors has far more after each pass: there all is given back at once.
    """

    def __init__(self) -> None:
        """Change nothing yet."""
        self._is_changed = False
        self._bound: int | None = None
        self._overhead = 0
        """Anonymous bytes of this process that are not the allocator's."""
        self._excesses = 0
        """Passes, up to the one that ended, that exceeded the bound by far."""

    def give_back(self) -> None:
        """Give freed large blocks back, now and from now on."""
        if self._bound is not None:
            give_back_freed_memory()
        self._bound = None
        self._is_changed |= give_back_large_blocks()

    def keep(self, nbytes: int) -> None:
        """Keep freed memory from now on, of which :meth:`bound` leaves at most ``nbytes``.

        Nothing changes where the C library does not tell what is in use.
        """
        if bytes_in_use() is None or not anonymous_bytes() or not keep_all_blocks():
            return
        self._is_changed = True
        self._bound, self._excesses = nbytes, 0
        self._trim()

    def bound(self) -> None:
        """Give freed memory back if there is more than may be kept; called when a forward pass ends."""
        if self._bound is None:
            return
        freed = self._others() - self._overhead
        if freed > self._bound:
            self._trim()
        if freed <= _FAR_MORE * self._bound:
            self._excesses = 0
            return
        self._excesses += 1
        if self._excesses == _EXCESSES:
            self.give_back()

    def close(self) -> None:
        """Let the process keep what it kept before."""
        self._bound = None
        if self._is_changed:
            keep_large_blocks()
        self._is_changed = False

    def _others(self) -> int:
        """Anonymous bytes that are not in use by blocks: freed ones, and those of other owners."""
        return anonymous_bytes() - (bytes_in_use() or 0)

    def _trim(self) -> None:
        give_back_freed_memory()
        self._overhead = self._others()
