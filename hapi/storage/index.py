"""The sample directory: five numbers per sample, as numpy arrays, never as Python objects.

DLFS keeps a directory of samples in memory so that any sample is one range read away. Ours is five arrays
(32 bytes a sample), mapped from the index file where the store is local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.errors import DataError
from hapi.storage.tensorfile import Array, decode_tensors, encode_tensors

MAX_SAMPLE_BYTES = (1 << 32) - 1
"""A sample's length is stored in 32 bits."""

_CHUNK = 1 << 20
FIELDS: Mapping[str, Any] = {
    "shard": np.uint32,
    "offset": np.uint64,
    "length": np.uint32,
    "label": np.int64,
    "checksum": np.uint64,
}


@dataclass(frozen=True)
class Located:
    """Where n samples lie, in the order asked for."""

    shard: npt.NDArray[np.uint32]
    """uint32 [n], a place in the manifest's list of shards."""
    offset: npt.NDArray[np.int64]
    """Bytes from the shard's start; int64 [n]."""
    length: npt.NDArray[np.int64]
    """Bytes; int64 [n]."""


@dataclass(frozen=True)
class SampleIndex:
    """Where every sample lies. All arrays are [count]; samples lie in shards without gaps, in order."""

    shard: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint32]
    label: npt.NDArray[np.int64]
    checksum: npt.NDArray[np.uint64]
    """xxh3_64 of the sample's bytes."""

    def __len__(self) -> int:
        return len(self.shard)

    @classmethod
    def empty(cls, count: int) -> Self:
        """An index to be filled."""
        return cls(**{name: np.empty(count, dtype=dtype) for name, dtype in FIELDS.items()})

    def locate(self, ids: npt.NDArray[np.int64]) -> Located:
        """Shard, offset and length of these samples, which must be there."""
        offset, length = self.offset[ids].astype(np.int64), self.length[ids].astype(np.int64)
        return Located(self.shard[ids], offset, length)

    def arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in FIELDS}

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> memoryview:
        """The index as a safetensors file."""
        return encode_tensors(self.arrays(), metadata)

    @classmethod
    def from_buffer(cls, buffer: Array, what: str) -> tuple[Self, dict[str, str]]:
        """An index as views of ``buffer`` (the file's bytes), and its metadata; DataError naming ``what``."""
        tensors, metadata = decode_tensors(buffer, what)
        if set(tensors) != set(FIELDS):
            raise DataError(f"{what}: expected the arrays {', '.join(FIELDS)}")
        count = len(tensors["shard"]) if tensors["shard"].ndim == 1 else -1
        for name, dtype in FIELDS.items():
            if tensors[name].dtype != dtype or tensors[name].shape != (count,):
                raise DataError(f"{what}: array {name!r} has the wrong type or length")
        return cls(**tensors), metadata

    def place(self, first: int, lengths: npt.NDArray[np.uint32], shard: int) -> None:
        """Lay samples ``first..`` of these lengths one after the other into ``shard``."""
        stop = first + len(lengths)
        self.shard[first:stop] = shard
        self.length[first:stop] = lengths
        self.offset[first:stop] = offsets_of(lengths)[:-1].astype(np.uint64)

    def part(self, first: int, stop: int) -> Self:
        """The samples ``first..stop`` (stop excluded), as views."""
        return type(self)(**{name: array[first:stop] for name, array in self.arrays().items()})

    def check_layout(
        self, sizes: Sequence[int], counts: Sequence[int], what: str, first_shard: int = 0
    ) -> None:
        """DataError unless the samples fill shards of these sizes and sample counts exactly, in order.

        The shards' numbers count from ``first_shard``.
        """
        if sum(counts) != len(self):
            raise DataError(f"{what}: {len(self)} samples in the index, {sum(counts)} in the shards")
        first = 0
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True), first_shard):
            self._check_shard(number, first, first + count, size, what)
            first += count

    def _check_shard(self, number: int, first: int, stop: int, size: int, what: str) -> None:
        end = 0
        for low in range(first, stop, _CHUNK):
            part = slice(low, min(low + _CHUNK, stop))
            ends = offsets_of(self.length[part]) + end
            if (self.shard[part] != number).any() or (self.offset[part] != ends[:-1].astype(np.uint64)).any():
                raise DataError(f"{what}: the samples of shard {number} do not lie one after the other")
            end = int(ends[-1])
        if end != size:
            raise DataError(f"{what}: the samples of shard {number} take {end} bytes, the shard has {size}")


def offsets_of(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where pieces of these lengths start when laid one after the other, and the end; int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def digest(data: Any) -> str:
    """xxh3_64 of a buffer as 16 hex digits: against accidents, not against forgery."""
    return xxhash.xxh3_64_hexdigest(data)
