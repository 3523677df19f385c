"""Memory for tensors that is used again: the kernel clears each page once, not for every load.

DStore preallocates its buffers for that reason (sections 3 and 6.5). A tensor that is loaded into host memory is
filled where it stays, so here its memory comes back when the tensor dies. Idle memory beyond a budget, or idle for
long, is given back to the system.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from hapi.errors import HostMemoryError
from hapi.process.direct_io import HUGE_PAGE
from hapi.repository.loading.regions import PAGE, Region

SMALL_BYTES = 64 << 10
"""Below this the C library's own heap serves: it keeps such blocks at no cost."""
REGION_BYTES = 64 << 20
"""Least bytes that are mapped at once."""
MAX_EXPECTED = 1 << 30
"""Most bytes that are mapped ahead of the tensors that will lie there."""
TEND_SECONDS = 5.0
"""Seconds between two checks whether memory has been idle for long."""

Block = tuple[int, int, int]
"""Number of a region, first and last (excluded) byte in it."""

_memories: weakref.WeakSet[TensorMemory] = weakref.WeakSet()


class TensorMemory:
    """Blocks of host memory that live as long as the tensors in them; thread-safe.

    A child of a fork begins with none. Tensors of its parent stay valid in it.
    """

    def __init__(self, idle_limit: int, idle_seconds: float) -> None:
        """Begin without any memory.

        Args:
            idle_limit: most bytes that are kept without a tensor in them.
            idle_seconds: time after which unused memory is given back.
        """
        self.idle_limit = idle_limit
        self.idle_seconds = idle_seconds
        self._numbers = 0
        """Number of the last region. It also grows on in a child, where blocks of the parent's are nobody's."""
        self._begin()
        _memories.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._returned: SimpleQueue[Block] = SimpleQueue()
        """Blocks of dead tensors. Garbage collection may put one in the middle of any operation, so that this takes
        no lock that could be held."""
        self._keeper: threading.Thread | None = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all regions, used or not."""
        with self._lock:
            return sum(region.nbytes for region in self._regions.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept, at most, without a tensor in them."""
        with self._lock:
            self._take_back()
            return sum(region.idle_bytes for region in self._regions.values())

    def take(self, nbytes: int, expected: int = 0) -> torch.Tensor:
        """Return uninitialised memory as a tensor of ``nbytes`` bytes (uint8), aligned to 64 bytes or more.

        It is free again when nothing refers to the tensor's storage any more.

        Args:
            nbytes: bytes of it.
            expected: bytes that will be taken in all, this block included: they are mapped at once, and so much idle
                memory stays for them whatever the budget.

        Raises:
            HostMemoryError: the system has no more memory.
        """
        if nbytes < SMALL_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._take_back(max(size, expected))  # what is taken now is not idle
            number, start = self._block(size, expected)
            array = self._regions[number].view(start, nbytes)
        block = (number, start, start + size)
        weakref.finalize(array, self._give, block).atexit = False
        return torch.from_numpy(array)

    def fill(self, nbytes: int) -> None:
        """Bring in ``nbytes`` of memory ahead, the budget at most: the first load is then as fast as later ones."""
        self.take(min(nbytes, self.idle_limit))[::PAGE] = 0

    def trim(self, idle_seconds: float = 0.0) -> None:
        """Give back memory that was idle for ``idle_seconds``."""
        with self._lock:
            self._take_back()
            self._trim(time.monotonic() - idle_seconds, 0)

    def _give(self, block: Block) -> None:
        self._returned.put(block)

    def _block(self, size: int, expected: int) -> tuple[int, int]:
        """Region and first byte of a block: the smallest free one that holds ``size`` bytes, or a new one.

        Those whose memory is already there come first.
        """
        fitting = [
            (block.pages < size, block.nbytes, number, i)
            for number, region in self._regions.items()
            for i, block in enumerate(region.free)
            if block.nbytes >= size
        ]
        if fitting:
            number, i = min(fitting)[2:]
            return number, self._regions[number].cut(i, size)
        self._trim(time.monotonic(), self.idle_limit)  # what is idle is of no use for it
        number = self._map(max(size, min(expected, MAX_EXPECTED)))
        return number, self._regions[number].cut(0, size)

    def _map(self, nbytes: int) -> int:
        size = -(-max(nbytes, REGION_BYTES) // HUGE_PAGE) * HUGE_PAGE
        try:
            region = Region(size)
        except (OSError, MemoryError) as error:
            raise HostMemoryError(
                f"the system refused {size} bytes of memory for tensors; free some, or load less at a time"
            ) from error
        self._numbers += 1
        self._regions[self._numbers] = region
        if self._keeper is None:
            keeper = threading.Thread(
                target=_keep, args=(weakref.ref(self),), name="hapi-tensor-memory", daemon=True
            )
            with suppress(RuntimeError):  # the system has no thread to spare; later loads give back
                keeper.start()
                self._keeper = keeper
        return self._numbers

    def _take_back(self, needed: int = 0) -> None:
        """Put the blocks of dead tensors among the free ones, within the budget or ``needed``. The lock is held."""
        now = time.monotonic()
        with suppress(Empty):
            while True:
                number, start, stop = self._returned.get_nowait()
                if number in self._regions:
                    self._regions[number].put_back(start, stop, now)
        self._trim(now, max(self.idle_limit, needed))

    def _trim(self, before: float, keep: int) -> None:
        """Give back what is idle since ``before``, but for ``keep`` bytes. The lock is held."""
        for number, region in list(self._regions.items()):
            keep -= region.give_back(before, keep)
            if region.is_free and not region.idle_bytes:
                del self._regions[number]

    def tend(self) -> bool:
        """Give back what has been idle for long; return whether there is memory left to tend."""
        with self._lock:
            self._take_back()
            self._trim(time.monotonic() - self.idle_seconds, 0)
            if not self._regions:
                self._keeper = None
            return bool(self._regions)


def _keep(memory: weakref.ref[TensorMemory]) -> None:
    """Tend a memory until it has none."""
    while True:
        time.sleep(TEND_SECONDS)
        kept = memory()
        if kept is None or not kept.tend():
            return
        del kept


def _forget() -> None:
    """Begin anew in a child: the lock's owner and the keeper are not in it, and its pages are copies."""
    for memory in list(_memories):
        memory._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
