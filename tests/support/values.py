"""A source of small tensors, and the moment at which tests with a clock of their own begin."""

from __future__ import annotations

import numpy as np

from hapi.data.manifest import SampleLayout
from hapi.ingest.sources.base import Source

BEGINNING = 4e9
"""Seconds since 1970."""


class Values(Source):
    """200 tensors of 16 bytes with known content, of two classes in turn."""

    def __init__(self, seed: int) -> None:
        self.description = "values"
        self.values = np.random.default_rng(seed).integers(0, 256, (200, 16), dtype=np.uint8)
        self.labels = np.arange(200, dtype=np.int64) % 2
        self.classes = ("a", "b")
        self.layout = SampleLayout(kind="tensor", sample_shape=(16,), sample_dtype="uint8")

    def sample(self, number: int) -> bytes:
        return self.values[number].tobytes()

    def content_key(self) -> bytes:
        return self.values.tobytes()
