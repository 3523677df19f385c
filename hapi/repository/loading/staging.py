"""Staging buffers between a store and a device that is not the host (DStore, section 3).

Their number is fixed, so loads that run at once share a bounded memory: a reader waits for a buffer. No reader waits
for anything of another load while it holds one, and none holds two, so that no wait is for ever. Where the device is
a GPU the memory is pinned, once: pinning costs more than reading.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hapi import waiting
from hapi.models.tensors import tensor_bytes

STAGE_BYTES = 8 << 20
"""Bytes of a buffer, which is the largest range that is read at once."""


class StageBuffer:
    """One buffer: read into from a store, copied from to a device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """Its bytes, uint8 [STAGE_BYTES]."""
        self.view = tensor_bytes(memory)
        self.copied: torch.cuda.Event | None = None
        """Done when the device has copied the last bytes; None where copies are done at once."""


class StagingArea:
    """A fixed number of buffers for all loads to one kind of device; thread-safe."""

    def __init__(self, buffers: int, *, pinned: bool) -> None:
        """Allocate the buffers.

        Args:
            buffers: their number.
            pinned: whether a GPU reads from them.
        """
        memory = torch.empty(buffers * STAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._free = deque(StageBuffer(part) for part in memory.split(STAGE_BYTES))
        """The one that was used longest ago comes first: its copy is the first to be done."""
        self._changed = threading.Condition()

    @contextmanager
    def buffer(self) -> Iterator[StageBuffer]:
        """Hold a buffer in the block, after waiting for one.

        Raises:
            StoreUnavailableError: this thread's work was given up meanwhile.
        """
        with self._changed:
            while not self._free:
                waiting.wait(self._changed)
            held = self._free.popleft()
        try:
            if held.copied is not None:
                held.copied.synchronize()
                held.copied = None
            yield held
        finally:
            with self._changed:
                self._free.append(held)
                self._changed.notify()
