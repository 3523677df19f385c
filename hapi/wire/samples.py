"""Stored samples as rooms pass them on: the bytes of many, one after the other, with their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray, LabelArray


@dataclass(frozen=True)
class Samples:
    """Bytes and labels of n samples, in the order asked for."""

    ids: IntArray
    """int64 [n]."""
    data: npt.NDArray[np.uint8]
    """All samples' bytes, one after the other; uint8 [total]."""
    offsets: IntArray
    """Sample i is ``data[offsets[i]:offsets[i + 1]]``; int64 [n + 1]."""
    labels: LabelArray
    """int64 [n], or float32 [n, k]."""

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, position: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the sample at ``position`` of this read, a view."""
        return self.data[int(self.offsets[position]) : int(self.offsets[position + 1])]


def offsets_of(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return where pieces of these lengths start when laid one after the other, and the end; int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets
