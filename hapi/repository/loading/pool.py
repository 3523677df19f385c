"""The staging pool of a process: memory that its loads share and use again."""

from __future__ import annotations

import os
import threading
from functools import cache

import torch

from hapi.process.free_memory import host_memory
from hapi.repository.loading.memory import TensorMemory
from hapi.repository.loading.staging import StagingArea

IDLE_SECONDS = 60.0
"""Seconds after which memory without a tensor in it is given back."""
IDLE_SHARE = 16
"""The pool keeps this part of the machine's memory idle, at most."""
STAGE_BUFFERS = 8
"""Buffers in all: two for each of four readers, one filled while the other is copied."""


class LoadingPool:
    """Memory for loads, used again by later ones; thread-safe.

    Into host memory tensors are read where they stay (:class:`TensorMemory`). Other devices copy them from a fixed
    number of staging buffers (:class:`StagingArea`), pinned for a GPU. A pool that is off allocates for each load, as
    DStore-OnDemand does (section 6.2).
    """

    def __init__(
        self,
        *,
        on: bool = True,
        idle_limit: int | None = None,
        idle_seconds: float = IDLE_SECONDS,
        buffers: int = STAGE_BUFFERS,
    ) -> None:
        """Begin without any memory.

        Args:
            on: whether memory is kept for the next load.
            idle_limit: most bytes that are kept without a tensor in them; None: a sixteenth of the machine's.
            idle_seconds: time after which unused memory is given back.
            buffers: number of staging buffers, of ``STAGE_BYTES`` each.
        """
        self.on = on
        self.memory = TensorMemory(
            host_memory() // IDLE_SHARE if idle_limit is None else idle_limit, idle_seconds
        )
        self._buffers = buffers
        self._areas: dict[bool, StagingArea] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int, expected: int = 0) -> torch.Tensor:
        """Return memory for a tensor of ``nbytes`` bytes (uint8); see :meth:`TensorMemory.take`."""
        return self.memory.take(nbytes, expected) if self.on else torch.empty(nbytes, dtype=torch.uint8)

    def staging(self, device: torch.device) -> StagingArea:
        """Return the staging buffers of loads to ``device``; a pool that is off allocates them now."""
        pinned = device.type == "cuda"
        if not self.on:
            return StagingArea(self._buffers, pinned=pinned)
        with self._lock:
            area = self._areas.get(pinned)
            if area is None:
                area = self._areas[pinned] = StagingArea(self._buffers, pinned=pinned)
            return area

    def trim(self, idle_seconds: float = 0.0) -> None:
        """Give back memory that was idle for ``idle_seconds``; staging buffers stay."""
        self.memory.trim(idle_seconds)


@cache
def _pool_of(process: int) -> LoadingPool:
    del process  # a child of a fork has a pool of its own: pinned memory is its parent's
    return LoadingPool()


def process_pool() -> LoadingPool:
    """Return the pool that all loads of this process share unless they name another."""
    return _pool_of(os.getpid())
