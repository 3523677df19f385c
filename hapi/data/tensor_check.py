"""Check of a stored tensor's bytes against the layout of its dataset."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hapi.data.manifest import SampleLayout

Check = Callable[[memoryview], str | None]
"""The problem of a sample's bytes, for a message; None when there is none."""


def tensor_check(layout: SampleLayout) -> Check:
    """Return the check of samples of ``layout``: the length, and for floats that every value is finite.

    Training with NaN or infinity ends with a model of them. Samples of bytes may be anything.
    """
    if layout.kind != "tensor" or layout.sample_dtype == "uint8":
        return lambda data: None
    dtype = np.dtype(layout.sample_dtype)
    size = math.prod(layout.sample_shape or ()) * dtype.itemsize

    def check(data: memoryview) -> str | None:
        """Raise ValueError unless ``data`` fits the layout."""
        if data.nbytes != size:
            return f"has {data.nbytes} bytes, a tensor of this dataset has {size}"
        if not np.isfinite(np.frombuffer(data, dtype=dtype)).all():
            return "holds a value that is not finite (NaN or infinity)"
        return None

    return check
