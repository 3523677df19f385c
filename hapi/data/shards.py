"""The shards of a dataset as arrays: object, size, checksum and number of samples of each.

A dataset may have a million shards (single objects that are indexed in place). So their table lies in the
index file beside the samples' arrays, and a Python object stands only for a shard that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.errors import DataError

MAX_SHARD_SIZE = 1 << 48
"""Bytes; the sample directory keeps offsets in 48 bits."""
MAX_SHARD_SAMPLES = 1 << 40
_TYPES: Mapping[str, tuple[Any, int]] = {
    "shard": (np.uint64, 2),
    "shard_end": (np.uint64, 1),
    "shard_name": (np.uint8, 1),
}
"""Element type and number of dimensions of each array."""
SHARD_FIELDS = tuple(_TYPES)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A stored object of samples: its name below the dataset's folder of shards, size in bytes, xxh3_64, samples."""

    key: str
    size: int
    checksum: int
    count: int


class ShardTable:
    """Shards 0..n-1; the samples of each have consecutive ids, in the order of the shards."""

    def __init__(
        self, numbers: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64], names: npt.NDArray[np.uint8]
    ) -> None:
        self._numbers = numbers
        """Size, checksum and count; [n, 3]."""
        self._ends = ends
        """End of each name in ``names``, UTF-8; [n]."""
        self._names = names

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Shard:
        size, checksum, count = self._numbers[number].tolist()
        return Shard(key=self.key(number), size=size, checksum=checksum, count=count)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Self:
        """Return the table of these shards."""
        names = [shard.key.encode() for shard in shards]
        rows = [(shard.size, shard.checksum, shard.count) for shard in shards]
        return cls(
            np.array(rows, dtype=np.uint64).reshape(-1, 3),
            np.cumsum([len(name) for name in names], dtype=np.uint64),
            np.frombuffer(bytearray().join(names), dtype=np.uint8),
        )

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """The shards of all tables, one table after the other."""
        lengths = [int(table._ends[-1]) if len(table) else 0 for table in tables]
        before = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.uint64)
        return cls(
            np.concatenate([table._numbers for table in tables]),
            np.concatenate([table._ends + first for table, first in zip(tables, before, strict=True)]),
            np.concatenate([table._names for table in tables]),
        )

    @property
    def size(self) -> npt.NDArray[np.uint64]:
        """Bytes of each shard, uint64 [n]."""
        return self._numbers[:, 0]

    @property
    def count(self) -> IntArray:
        """Samples of each shard, int64 [n]."""
        return self._numbers[:, 2].astype(np.int64)

    @cached_property
    def firsts(self) -> IntArray:
        """First sample of each shard: shard k has samples ``firsts[k]..firsts[k + 1]``; int64 [n + 1]."""
        firsts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self._numbers[:, 2], out=firsts[1:])
        return firsts

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards together."""
        return int(self.size.sum())

    def key(self, number: int) -> str:
        """The shard's name below the folder of shards."""
        first = int(self._ends[number - 1]) if number else 0
        return self._names[first : int(self._ends[number])].tobytes().decode()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the index file by name, as views."""
        return {"shard": self._numbers, "shard_end": self._ends, "shard_name": self._names}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], what: str, remedy: str) -> Self:
        """Return the table in these arrays, checked.

        Args:
            arrays: arrays of the index file, by name.
            what: name of the index, for messages.
            remedy: advice for the user.

        Raises:
            DataError: the arrays are not a table of shards.
        """
        numbers, ends, names = (arrays[name] for name in _TYPES)
        if any(arrays[name].dtype != d or arrays[name].ndim != n for name, (d, n) in _TYPES.items()):
            raise DataError(f"{what}: an array of the table of shards has the wrong type or form; {remedy}")
        if len(numbers) == 0 or numbers.shape != (len(ends), 3):
            raise DataError(f"{what}: the arrays of the table of shards do not fit each other; {remedy}")
        if (numbers[:, 0] > MAX_SHARD_SIZE).any() or (
            (numbers[:, 2] - np.uint64(1)) >= MAX_SHARD_SAMPLES
        ).any():
            raise DataError(f"{what}: a shard's size or number of samples is out of range; {remedy}")
        whole = int(ends[0]) > 0 and bool((ends[1:] > ends[:-1]).all()) and int(ends[-1]) == len(names)
        # A name begins with no byte that goes on with a letter before it.
        if not whole or (names[ends[:-1].astype(np.int64)] & 0xC0 == 0x80).any():
            raise DataError(f"{what}: the shards' names are damaged; {remedy}")
        try:
            names.tobytes().decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{what}: the shards' names are damaged ({error}); {remedy}") from error
        return cls(numbers, ends, names)
