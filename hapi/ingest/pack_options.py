"""Options of ``hapi pack``, and the samples of the source that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hapi.arrays import IntArray
from hapi.data.epoch_order import sample_hash
from hapi.errors import UsageError
from hapi.wire.references import TransformSpec

DEFAULT_SHARD_BYTES = 64 << 20
"""Large enough that a store's few ms a request do not count, small enough to be held in memory."""
MIN_SHARD_BYTES = 1 << 10
MAX_SHARD_BYTES = 4 << 30

Preprocess = Literal["none", "uint8", "float32"]
Part = Literal["all", "train", "validation"]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Options of a packing. All but ``workers`` and ``skip_bad`` are part of its fingerprint.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> hapi.pack("dots.npz", "store/few", hapi.PackOptions(limit=3, shard_bytes=1 << 20)).count
    3
    """

    shard_bytes: int = DEFAULT_SHARD_BYTES
    transform: TransformSpec | None = None
    """None: the source's own, or the default for encoded images."""
    preprocess: Preprocess = "none"
    """Store tensors made by the transform instead of encoded images, as in the papers' evaluation:
    "uint8" after resize and crop, "float32" after normalisation too."""
    limit: int | None = None
    """Pack at most this many samples, spread evenly over the source."""
    part: Part = "all"
    validation_fraction: float = 0.2
    """Share of the samples that are in the part "validation": chosen by a fixed hash of their number."""
    workers: int = 4
    """Threads that read (and pre-process) the source."""
    decode: bool = False
    """Decode every image that is stored as it is; otherwise only its beginning is checked."""
    skip_bad: bool = False
    """Leave bad samples out and count them; otherwise the first one is an error."""

    def checked(self) -> PackOptions:
        """Return these options; :class:`UsageError` naming the first that is out of range."""
        if not MIN_SHARD_BYTES <= self.shard_bytes <= MAX_SHARD_BYTES:
            raise UsageError(
                f"shard size {self.shard_bytes}: expected {MIN_SHARD_BYTES} to {MAX_SHARD_BYTES} bytes"
            )
        if self.transform is not None and self.transform.random:
            raise UsageError("a dataset's own transform is not random; give --augment to hapi-train")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit {self.limit}: expected at least 1 sample")
        if not 0 < self.validation_fraction < 1:
            raise UsageError(
                f"validation fraction {self.validation_fraction}: expected more than 0 and less than 1"
            )
        if not 1 <= self.workers <= 256:
            raise UsageError(f"workers {self.workers}: expected 1 to 256")
        return self


def select(count: int, options: PackOptions) -> IntArray:
    """Return the numbers of the source's samples to pack, ascending; :class:`UsageError` when there are none."""
    chosen = np.arange(count, dtype=np.int64)
    if options.part != "all":
        share = sample_hash(0, 0, count).astype(np.float64) / 2.0**64
        chosen = chosen[(share < options.validation_fraction) == (options.part == "validation")]
    if options.limit is not None and options.limit < len(chosen):
        chosen = chosen[np.arange(options.limit, dtype=np.int64) * len(chosen) // options.limit]
    if not len(chosen):
        raise UsageError(f"the part {options.part!r} of {count} samples is empty; pack more, or another part")
    return chosen
