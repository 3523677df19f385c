"""The index file of a dataset: the sample directory, the labels and checksums of all samples, and the shards.

Arrays (32 bytes a sample, 32 and its name a shard) in one safetensors file. They are numpy arrays throughout, never
Python objects. The checksums of runs (8 bytes for 64 KB, ``runs.py``) may be left away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import LabelArray
from hapi.data.manifest import REMEDY
from hapi.data.sample_directory import SampleDirectory
from hapi.data.shards import SHARD_FIELDS, ShardTable
from hapi.errors import DataError
from hapi.store.safetensors import Array, decode_tensors, encode_tensors

_SAMPLE_FIELDS: Mapping[str, tuple[Any, tuple[int, ...]]] = {
    "place": (np.uint64, (2,)),
    "checksum": (np.uint64, ()),
}
"""Element type of each array, and its shape per sample."""
_LABEL, _RUN = "label", "run"
FIELDS = ("place", _LABEL, "checksum", *SHARD_FIELDS, _RUN)


def _no_runs() -> npt.NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class SampleIndex:
    """Facts about every sample, and about the shards that hold them."""

    directory: SampleDirectory
    label: LabelArray
    """int64 [count], or float32 [count, k]; see :class:`hapi.wire.labels.LabelForm`."""
    checksum: npt.NDArray[np.uint64]
    """xxh3_64 of the sample's bytes; [count]"""
    shards: ShardTable
    run: npt.NDArray[np.uint64] = field(default_factory=_no_runs)
    """xxh3_64 of runs of samples, shard by shard (``runs.py``), or none."""

    def __len__(self) -> int:
        return len(self.directory)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the samples of all parts, one part after the other; each part's shards count from 0."""
        directory = SampleDirectory(np.concatenate([part.directory.entries for part in parts]))
        sample, shard = 0, 0
        for part in parts:
            directory.entries["shard"][sample : sample + len(part)] += np.uint32(shard)
            sample += len(part)
            shard += len(part.shards)
        return cls(
            directory=directory,
            label=np.concatenate([part.label for part in parts]),
            checksum=np.concatenate([part.checksum for part in parts]),
            shards=ShardTable.joined([part.shards for part in parts]),
            run=np.concatenate([part.run for part in parts]),
        )

    def arrays(self) -> dict[str, Array]:
        """The arrays of the file by name, as views."""
        samples = {"place": self.directory.words(), "label": self.label, "checksum": self.checksum}
        return {**samples, **self.shards.arrays(), _RUN: self.run}

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> memoryview:
        """The index as a safetensors file."""
        return encode_tensors(self.arrays(), metadata)

    @classmethod
    def from_buffer(cls, buffer: Array, what: str) -> tuple[Self, dict[str, str]]:
        """Return an index as views of ``buffer`` (the file's bytes), and its metadata; DataError naming
        ``what``.
        """
        tensors, metadata = decode_tensors(buffer, what)
        if set(tensors) != set(FIELDS):
            raise DataError(
                f"{what}: expected the arrays {', '.join(FIELDS)}, found {', '.join(sorted(tensors))[:200]}: "
                f"no index, or one of another version of Hapi; {REMEDY}"
            )
        label = tensors[_LABEL]
        if label.ndim not in (1, 2) or label.dtype != (np.int64 if label.ndim == 1 else np.float32):
            raise DataError(f"{what}: array {_LABEL!r} has the wrong type or shape; {REMEDY}")
        count = len(label)
        for name, (dtype, shape) in _SAMPLE_FIELDS.items():
            if tensors[name].dtype != dtype or tensors[name].shape != (count, *shape):
                raise DataError(f"{what}: array {name!r} has the wrong type or length; {REMEDY}")
        if tensors[_RUN].dtype != np.uint64 or tensors[_RUN].ndim != 1:
            raise DataError(f"{what}: array {_RUN!r} has the wrong type or shape; {REMEDY}")
        index = cls(
            directory=SampleDirectory.from_words(tensors["place"]),
            label=label,
            checksum=tensors["checksum"],
            shards=ShardTable.from_arrays(tensors, what, REMEDY),
            run=tensors[_RUN],
        )
        return index, metadata

    def digest(self) -> str:
        """xxh3_64 over all arrays, as 16 hex digits."""
        state = xxhash.xxh3_64()
        for array in self.arrays().values():
            state.update(array.data)
        return state.hexdigest()


def digest(data: Any) -> str:
    """Return the xxh3_64 of a buffer as 16 hex digits: against accidents, not against forgery."""
    return xxhash.xxh3_64_hexdigest(data)
