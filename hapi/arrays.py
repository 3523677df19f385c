"""Names of the array types that rooms hand to each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
LabelArray = npt.NDArray[np.int64 | np.float32]
"""Labels of n samples: int64 [n], or float32 [n, k] (:class:`hapi.wire.labels.LabelForm`)."""
HashArray = npt.NDArray[np.uint64]
"""Hashes and checksums, xxh3 or the sequence's own."""
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
