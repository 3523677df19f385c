"""A device whose memory is a file without a name in the host's memory, and a process that takes weights on it.

As with memory of a CUDA device, a process that has the file maps the same bytes, and they live until nobody does.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import torch

from hapi.models.shared.device_weights import DeviceWeights
from support.weight_tools import Contents, Source, contents_of


class MemfdBlock(mmap.mmap):
    """A :class:`~hapi.models.shared.device_weights.Block`."""

    lock: mmap.mmap | None = None
    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)

    def file(self) -> int:
        return os.dup(self.descriptor)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self, dtype=torch.uint8, offset=start, count=nbytes)

    def written(self) -> None:
        pass


class MemfdMemory:
    """A :class:`~hapi.models.shared.device_weights.BlockMemory`; ``room`` bytes can be taken at once."""

    name = "gpu-0"

    def __init__(self, room: int = 1 << 30) -> None:
        self.total_bytes = room
        self.made = self.opened = 0

    def make(self, nbytes: int) -> MemfdBlock:
        if nbytes > self.total_bytes:
            raise OSError(errno.ENOMEM, "the device is full")
        self.made += 1
        file = os.memfd_create("block")
        os.ftruncate(file, nbytes)
        return self._mapped(file, nbytes)

    def open(self, file: int, nbytes: int) -> MemfdBlock:
        self.opened += 1
        return self._mapped(file, nbytes)

    @staticmethod
    def _mapped(file: int, nbytes: int) -> MemfdBlock:
        block = MemfdBlock(file, nbytes)
        block.descriptor = file
        return block


def taken(weights: DeviceWeights, source: Source) -> Contents:
    """Take all contents of ``source``, and check them."""
    found = dict(weights.take(source.contents, source))
    assert found.keys() == source.contents.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in source.contents.items())
    return found


def main(folder: str, count: str) -> None:
    """Take contents, say how many were loaded here, and stay until the standard input ends."""
    source = Source(contents_of(int(count)))
    found = taken(DeviceWeights(Path(folder), MemfdMemory()), source)
    print(f"loaded {len(source.asked)}", flush=True)
    sys.stdin.read()
    assert found
