"""The data of ``benchmarks samples``: the same samples packed, as a file each, and in the formats of peers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.storage.samples_peers import write_form
from hapi.data.manifest import SampleLayout
from hapi.ingest.sources.base import Source
from hapi.store.open import open_store

NAME, LARGE = "samples", "large"
MIX_MEDIAN, MIX_SIGMA, MIX_MOST = 110e3, 0.5, 1 << 20
"""Sizes like ImageNet's files: log-normal around 110 KB."""
MOST_FILES = 10_000
"""A file each costs an inode; so many show the rate. The packed dataset is not cut."""
_FOLDER_FILES = 1_000


class RandomBytes(Source):
    """Samples of one size (as tensors), or of a mix of sizes (as encoded images that nobody decodes)."""

    def __init__(self, size: int, total: int) -> None:
        self.description = f"random bytes, {size or 'mix'}"
        generator = np.random.default_rng(1)
        if size:
            lengths = np.full(max(2, total // size), size, dtype=np.int64)
            self.layout = SampleLayout(kind="tensor", sample_shape=(size,), sample_dtype="uint8")
        else:
            drawn = generator.lognormal(np.log(MIX_MEDIAN), MIX_SIGMA, max(2, int(total / MIX_MEDIAN)))
            lengths = np.clip(drawn, 64, MIX_MOST).astype(np.int64)
            self.layout = SampleLayout(kind="tensor", sample_shape=(1,), sample_dtype="uint8")
        self.lengths = lengths
        self.labels = np.zeros(len(lengths), dtype=np.int64)
        self.classes = ("one",)
        self._bytes = generator.integers(0, 256, MIX_MOST + int(lengths.max()), dtype=np.uint8)

    def sample(self, number: int) -> bytes:
        """Return the sample's bytes."""
        start = number * 7919 % MIX_MOST
        return self._bytes[start : start + int(self.lengths[number])].tobytes()

    def content_key(self) -> bytes:
        """Return seed and size."""
        return self.lengths.tobytes()


def pack_data(store: str, size: int, total: int, name: str = NAME) -> RandomBytes:
    """Pack the samples as dataset ``name`` into ``store``; what they are made of."""
    from hapi.ingest.pack import pack  # not for every reader: it imports torch

    source = RandomBytes(size, total)
    pack(source, open_store(store), name)
    return source


def make_data(folder: Path, size: int, total: int, forms: Iterable[str]) -> npt.NDArray[np.int64]:
    """Write packed samples, files and the peers' ``forms`` onto the disk; the samples' lengths, int64 [n]."""
    source = pack_data(str(folder / "store"), size, total)
    files = min(MOST_FILES, source.count)
    for first in range(0, files, _FOLDER_FILES):
        group = folder / "files" / str(first // _FOLDER_FILES)
        group.mkdir(parents=True)
        for number in range(first, min(first + _FOLDER_FILES, files)):
            (group / str(number)).write_bytes(source.sample(number))
    for form in forms:
        write_form(form, folder, source, files)
    os.sync()  # pages that are not written yet cannot be dropped
    return source.lengths


def file_of(folder: Path, number: int) -> Path:
    """The file of one sample."""
    return folder / "files" / str(number // _FOLDER_FILES) / str(number)
