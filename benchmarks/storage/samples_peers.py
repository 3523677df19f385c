"""Other loaders in ``benchmarks samples``, where installed: the same samples in their formats, and how to read them.

Each in one process with its own shuffle at its own defaults; the quality of the order that came stands beside the
rate. Imports and all that happens before an epoch's first sample is there are outside of the clock.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import tarfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hapi.arrays import IntArray
from hapi.ingest.sources.base import Source

LIBRARIES = {"tars": "webdataset", "mds": "streaming", "litdata": "litdata"}
"""The library that each form needs."""
_SHARD_SAMPLES = 2_000
_SHARD_BYTES = 64 << 20
_SEED = 1
_NUMBER_BYTES = 8
"""LitData's samples have no key: their number stands in front of them."""


def missing() -> tuple[str, ...]:
    """Forms whose library is not installed here."""
    return tuple(form for form, library in LIBRARIES.items() if importlib.util.find_spec(library) is None)


def write_form(form: str, folder: Path, source: Source, count: int) -> None:
    """The first ``count`` samples in a peer's format below ``folder / form``."""
    target = folder / form
    {"tars": _write_tars, "mds": _write_mds, "litdata": _write_litdata}[form](target, source, count)


def open_form(form: str, folder: Path, batch: int) -> Callable[[], Iterator[int]]:
    """Opens a peer's epochs, shuffled: ids of samples whose bytes are there. The first of them is there already."""
    epoch = {"tars": _read_tars, "mds": _read_mds, "litdata": _read_litdata}[form](folder / form, batch)

    def begin() -> Iterator[int]:
        """Begin an epoch."""
        ids = epoch()
        return itertools.chain([next(ids)], ids)

    return begin


def batches_of(ids: Iterator[int], batch: int) -> Generator[IntArray]:
    """The same in arrays of ``batch`` ids."""
    while group := tuple(itertools.islice(ids, batch)):
        yield np.array(group, dtype=np.int64)


def _write_tars(target: Path, source: Source, count: int) -> None:
    target.mkdir()
    for first in range(0, count, _SHARD_SAMPLES):
        with tarfile.open(target / f"{first // _SHARD_SAMPLES:05}.tar", "w") as tar:
            for number in range(first, min(first + _SHARD_SAMPLES, count)):
                data = source.sample(number)
                member = tarfile.TarInfo(f"{number}.bin")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _read_tars(target: Path, batch: int) -> Callable[[], Iterator[int]]:
    """Shards shuffled, and a buffer of 1000 samples (the library's default)."""
    webdataset = importlib.import_module("webdataset")
    tars = sorted(str(path) for path in target.iterdir())
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False).shuffle(1000)
    return _ids(dataset, lambda sample: (int(sample["__key__"]), sample["bin"]))


def _write_mds(target: Path, source: Source, count: int) -> None:
    streaming = importlib.import_module("streaming")
    with streaming.MDSWriter(
        out=str(target), columns={"n": "int", "data": "bytes"}, size_limit=_SHARD_BYTES
    ) as writer:
        for number in range(count):
            writer.write({"n": number, "data": bytes(source.sample(number))})


def _read_mds(target: Path, batch: int) -> Callable[[], Iterator[int]]:
    """``py1e``, the library's default."""
    streaming = importlib.import_module("streaming")
    dataset = streaming.StreamingDataset(
        local=str(target), shuffle=True, shuffle_seed=_SEED, batch_size=batch
    )
    return _ids(dataset, lambda sample: (int(sample["n"]), sample["data"]))


def _write_litdata(target: Path, source: Source, count: int) -> None:
    cache = importlib.import_module("litdata.streaming").Cache(str(target), chunk_bytes=_SHARD_BYTES)
    for number in range(count):
        cache[number] = number.to_bytes(_NUMBER_BYTES, "little") + bytes(source.sample(number))
    cache.done()
    cache.merge()


def _read_litdata(target: Path, batch: int) -> Callable[[], Iterator[int]]:
    dataset = importlib.import_module("litdata").StreamingDataset(str(target), shuffle=True, seed=_SEED)
    return _ids(dataset, lambda data: (int.from_bytes(data[:_NUMBER_BYTES], "little"), data[_NUMBER_BYTES:]))


def _ids(dataset: Any, parts: Callable[[Any], tuple[int, Any]]) -> Callable[[], Iterator[int]]:
    def epoch() -> Iterator[int]:
        for sample in dataset:
            number, data = parts(sample)
            if not len(data):
                raise ValueError(f"sample {number} came empty")
            yield number

    return epoch
