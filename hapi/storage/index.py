"""The index file of a data set: the sample directory, and beside it the labels and checksums of all samples.

Arrays (32 bytes a sample) in one safetensors file, mapped where the store is local. They are numpy arrays
throughout, never Python objects. The checksums of runs (8 bytes for 64 KB, ``runs.py``) may be left away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.errors import DataError
from hapi.storage.directory import SampleDirectory
from hapi.storage.tensorfile import Array, decode_tensors, encode_tensors

FIELDS: Mapping[str, tuple[Any, tuple[int, ...]]] = {
    "place": (np.uint64, (2,)),
    "label": (np.int64, ()),
    "checksum": (np.uint64, ()),
}
"""Element type of each array, and its shape per sample."""
_RUN = "run"


def _no_runs() -> npt.NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class SampleIndex:
    """What is known of every sample."""

    directory: SampleDirectory
    label: npt.NDArray[np.int64]
    """[count]"""
    checksum: npt.NDArray[np.uint64]
    """xxh3_64 of the sample's bytes; [count]"""
    run: npt.NDArray[np.uint64] = field(default_factory=_no_runs)
    """xxh3_64 of runs of samples, shard by shard (``runs.py``), or none; of all the index only."""

    def __len__(self) -> int:
        return len(self.directory)

    @classmethod
    def empty(cls, count: int) -> Self:
        """An index to be filled."""
        return cls(
            directory=SampleDirectory.empty(count),
            label=np.empty(count, dtype=np.int64),
            checksum=np.empty(count, dtype=np.uint64),
        )

    def arrays(self) -> dict[str, Array]:
        """The arrays of the file by name, as views."""
        return {
            "place": self.directory.words(), "label": self.label, "checksum": self.checksum, _RUN: self.run,
        }  # fmt: skip

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> memoryview:
        """The index as a safetensors file."""
        return encode_tensors(self.arrays(), metadata)

    @classmethod
    def from_buffer(cls, buffer: Array, what: str) -> tuple[Self, dict[str, str]]:
        """An index as views of ``buffer`` (the file's bytes), and its metadata; DataError naming ``what``."""
        tensors, metadata = decode_tensors(buffer, what)
        if set(tensors) != {*FIELDS, _RUN}:
            raise DataError(
                f"{what}: expected the arrays {', '.join((*FIELDS, _RUN))}, found {', '.join(sorted(tensors))[:200]}: "
                "no index, or one of another version of Hapi; pack the data set again"
            )
        count = len(tensors["label"]) if tensors["label"].ndim == 1 else -1
        for name, (dtype, shape) in FIELDS.items():
            if tensors[name].dtype != dtype or tensors[name].shape != (count, *shape):
                raise DataError(
                    f"{what}: array {name!r} has the wrong type or length; pack the data set again"
                )
        if tensors[_RUN].dtype != np.uint64 or tensors[_RUN].ndim != 1:
            raise DataError(f"{what}: array {_RUN!r} has the wrong type or shape; pack the data set again")
        directory = SampleDirectory.from_words(tensors["place"])
        index = cls(directory, tensors["label"], tensors["checksum"], tensors[_RUN])
        return index, metadata

    def part(self, first: int, stop: int) -> Self:
        """The samples ``first..stop`` (stop excluded), as views, without runs."""
        return type(self)(
            directory=self.directory.part(first, stop),
            label=self.label[first:stop],
            checksum=self.checksum[first:stop],
        )

    def digest(self) -> str:
        """xxh3_64 over all arrays, as 16 hex digits."""
        state = xxhash.xxh3_64()
        for array in self.arrays().values():
            state.update(array.data)
        return state.hexdigest()


def digest(data: Any) -> str:
    """xxh3_64 of a buffer as 16 hex digits: against accidents, not against forgery."""
    return xxhash.xxh3_64_hexdigest(data)
