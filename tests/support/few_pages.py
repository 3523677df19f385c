"""Memory for loads larger than the machine's: all tensors lie in the same few pages, each in a mapping of its own.

The kernel counts a page in the resident memory of a process once for each mapping, so that this is what it would be if
each tensor had pages of its own.
"""

from __future__ import annotations

import mmap
import os

import torch

from hapi.repository.loading.pool import LoadingPool


class FewPages(LoadingPool):
    """Gives memory for tensors of up to ``nbytes`` bytes, which all have the content that was read last."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(on=False)
        self.taken: list[int] = []
        """Bytes of all tensors so far."""
        self._file = os.memfd_create("pages")
        os.ftruncate(self._file, nbytes)

    def take(self, nbytes: int, expected: int = 0) -> torch.Tensor:
        self.taken.append(nbytes)
        return torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
