"""Reused host memory for features: a received batch goes into memory that is warm, pinned when there is a GPU.

Copying into fresh memory runs at 2.3 GB/s here, into warm memory at 10.5. A buffer comes back by itself when
the last tensor over it is gone, so a tensor that a training loop keeps is never overwritten. A copy to a GPU that
is still under way does not count as a tensor: whoever begins one keeps the tensor until it has ended.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch

KEEP = 8
"""Free buffers kept for reuse; more are given back to the system (pinned ones to torch, which keeps them)."""


class BufferPool:
    """Hands out host tensors; thread-safe."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = (
            threading.RLock()
        )  # the garbage collector may give a buffer back inside one of these calls
        self._free: list[torch.Tensor] = []

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous host tensor over a reused buffer when one fits."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = self._take(nbytes)
        # torch keeps the array alive as long as any tensor shares its memory; the array's end frees the buffer.
        owner = np.frombuffer(raw.numpy().data[:nbytes], dtype=np.uint8)
        weakref.finalize(owner, self._give, raw).atexit = False
        return torch.from_numpy(owner).view(dtype).reshape(shape)

    def _take(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= 2 * nbytes]
            if fitting:
                best = min(fitting, key=torch.Tensor.numel)
                self._free = [b for b in self._free if b is not best]
                return best
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _give(self, raw: torch.Tensor) -> None:
        with self._lock:
            self._free.append(raw)
            del self._free[:-KEEP]
