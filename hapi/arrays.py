"""Names of the array types that rooms hand to each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
"""Hashes and checksums, xxh3 or the sequence's own."""
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
