"""The data of ``hapi bench samples``: the same samples packed, as a file each, and as tar shards."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hapi.storage.manifest import SampleLayout
from hapi.storage.objects import open_store
from hapi.storage.sources import Source

NAME = "samples"
MIX_MEDIAN, MIX_SIGMA, MIX_MOST = 110e3, 0.5, 1 << 20
"""Sizes like ImageNet's files: log-normal around 110 KB."""
MOST_FILES = 10_000
"""A file each costs an inode; so many show the rate. The packed data set is not cut."""
_TAR_SAMPLES = 2_000
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
        start = number * 7919 % MIX_MOST
        return self._bytes[start : start + int(self.lengths[number])].tobytes()

    def content_key(self) -> bytes:
        return self.lengths.tobytes()


def make_data(folder: Path, size: int, total: int, tars: bool) -> npt.NDArray[np.int64]:
    """Write all forms below ``folder`` and onto the disk; the samples' lengths, int64 [n]."""
    from hapi.storage.pack import pack  # not for every reader: it imports torch

    source = RandomBytes(size, total)
    pack(source, open_store(str(folder / "store")), NAME)
    files = min(MOST_FILES, source.count)
    for first in range(0, files, _FOLDER_FILES):
        group = folder / "files" / str(first // _FOLDER_FILES)
        group.mkdir(parents=True)
        for number in range(first, min(first + _FOLDER_FILES, files)):
            (group / str(number)).write_bytes(source.sample(number))
    if tars:
        (folder / "tars").mkdir()
        for first in range(0, files, _TAR_SAMPLES):
            _write_tar(
                folder / "tars" / f"{first // _TAR_SAMPLES:05}.tar",
                source,
                first,
                min(first + _TAR_SAMPLES, files),
            )
    os.sync()  # pages that are not written yet cannot be dropped
    return source.lengths


def file_of(folder: Path, number: int) -> Path:
    """The file of one sample."""
    return folder / "files" / str(number // _FOLDER_FILES) / str(number)


def _write_tar(path: Path, source: RandomBytes, first: int, stop: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(first, stop):
            data = source.sample(number)
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
