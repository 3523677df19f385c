"""A source of tensors of bytes."""

from __future__ import annotations

import numpy as np

from hapi.data.manifest import SampleLayout
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.base import Source


class ByteSource(Source):
    """Tensors of bytes of one shape with known content."""

    def __init__(self, count: int, size: int = 16, seed: int = 0, fail_at: int | None = None) -> None:
        self.description = "bytes"
        self.values = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
        self.labels = np.arange(count, dtype=np.int64) % 4
        self.classes = ("a", "b", "c", "d")
        self.layout = SampleLayout(kind="tensor", sample_shape=(size,), sample_dtype="uint8")
        self.fail_at = fail_at

    def sample(self, number: int) -> bytes:
        if number == self.fail_at:
            raise KeyboardInterrupt
        return self.values[number].tobytes()

    def content_key(self) -> bytes:
        return self.values.tobytes()


SMALL = PackOptions(shard_bytes=1024)
