"""A file of tensors in shared memory: written once, then mapped by any number of processes.

    8 bytes    b"HAPIWTS1"
    8 bytes    length of the header, little-endian
    header     JSON: keys of content with the first byte and the bytes of each
    tensors    each at a multiple of 64 bytes, as torch aligns its own

The header is there before the tensors, so that others see who is loading which of them.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import xxhash

from hapi.errors import DataError
from hapi.models.tensors import tensor_bytes
from hapi.wire.documents import parse_document

MAGIC = b"HAPIWTS1"
PACK_BYTES = 64 << 20
"""Size from which on tensors that are loaded together go into another pack: what is evicted at once."""
ALIGNMENT = 64
"""Torch aligns tensors to so many bytes: at other addresses kernels may be chosen that give other last bits."""
_HEAD_BYTES = 16
_MOST_HEADER = 64 << 20


class TensorRange(NamedTuple):
    """Place of a tensor in a pack, in bytes."""

    start: int
    nbytes: int


Ranges = Mapping[str, TensorRange]


def layout(wanted: Mapping[str, int]) -> tuple[bytes, Ranges]:
    """Return the head of a pack for tensors of these bytes, by key, and their ranges in it."""
    relative, end = {}, 0
    for key, nbytes in wanted.items():
        relative[key] = end
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps([[key, start, wanted[key]] for key, start in relative.items()]).encode()
    first = -(-(_HEAD_BYTES + len(header)) // mmap.PAGESIZE) * mmap.PAGESIZE
    head = (MAGIC + len(header).to_bytes(8, "little") + header).ljust(first, b"\0")
    return head, {key: TensorRange(first + start, wanted[key]) for key, start in relative.items()}


def size_of(head: bytes, ranges: Ranges) -> int:
    """Return the bytes of a whole pack."""
    return max((place.start + place.nbytes for place in ranges.values()), default=len(head))


def read_ranges(descriptor: int) -> Ranges:
    """Return the ranges of a pack's tensors; :class:`DataError` for a file that is no pack of this version."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _HEAD_BYTES, 0)
    length = int.from_bytes(head[8:], "little")
    if head[:8] != MAGIC or not 0 < length <= min(size, _MOST_HEADER):
        raise DataError("shared weights: a file is no pack of this version")
    try:
        rows = parse_document(os.pread(descriptor, length, _HEAD_BYTES))
        first = -(-(_HEAD_BYTES + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        ranges = {str(key): TensorRange(first + int(start), int(nbytes)) for key, start, nbytes in rows}
    except (ValueError, TypeError):
        raise DataError("shared weights: a pack's header is damaged") from None
    if any(place.nbytes < 1 or not first <= place.start <= size - place.nbytes for place in ranges.values()):
        raise DataError("shared weights: a pack is shorter than its header says")
    return ranges


def mapped(descriptor: int) -> mmap.mmap:
    """Return a private mapping of an open pack.

    All processes read the same pages. A write, which nobody intends, goes to a copy of its page that only this mapping
    has. The mapping holds the open file, and with it the lock on it, until the last tensor over it is gone.
    """
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


class PackWriter:
    """A pack that is being written; its file is open and locked."""

    def __init__(self, descriptor: int, head: bytes, ranges: Ranges) -> None:
        """Begin a pack in an empty file: it has its size and its header from now on. OSError when that fails."""
        self.descriptor = descriptor
        self.ranges = ranges
        self.size = size_of(head, ranges)
        self._sums: dict[str, int] = {}
        os.ftruncate(descriptor, self.size)
        _write(descriptor, head, 0)

    def allocate(self) -> None:
        """Take the memory; OSError when there is none. A mapped page without memory would end the process (SIGBUS)."""
        os.posix_fallocate(self.descriptor, 0, self.size)

    def write(self, key: str, tensor: torch.Tensor) -> bool:
        """Write a tensor; return whether it was the last one that was missing."""
        place, data = self.ranges[key], tensor_bytes(tensor)
        if data.nbytes != place.nbytes:
            raise DataError(f"shared weights: tensor {key[:80]} has {data.nbytes} bytes, not {place.nbytes}")
        _write(self.descriptor, data, place.start)
        self._sums[key] = xxhash.xxh3_64_intdigest(data)
        return len(self._sums) == len(self.ranges)

    def touch(self) -> None:
        """Show others that its process goes on."""
        os.utime(self.descriptor)

    def check(self) -> None:
        """Read everything back; :class:`DataError` unless it is what was written, and all of it."""
        with mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as view:
            for key, place in self.ranges.items():
                with view[place.start : place.start + place.nbytes] as part:
                    if xxhash.xxh3_64_intdigest(part) != self._sums.get(key):
                        raise DataError(f"shared weights: tensor {key[:80]} was not written whole")


def _write(descriptor: int, data: bytes | memoryview, start: int) -> None:
    with memoryview(data) as view:
        done = 0
        while done < view.nbytes:
            done += os.pwrite(descriptor, view[done:], start + done)


def divided(wanted: Iterable[tuple[str, int]], limit: int) -> list[dict[str, int]]:
    """Divide tensors (key, bytes) in their order into packs of at most ``limit`` bytes; a larger one is alone."""
    packs: list[dict[str, int]] = []
    filled = 0
    for key, nbytes in wanted:
        if not packs or filled + nbytes > limit:
            packs.append({})
            filled = 0
        packs[-1][key] = nbytes
        filled += nbytes
    return packs
