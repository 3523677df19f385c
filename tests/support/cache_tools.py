"""A sample cache of samples that are known from their ids."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples, offsets_of

COUNT = 400
PHOTOS = DatasetReference(name="photos", version="0123456789abcdef")
OTHER = DatasetReference(name="photos", version="f" * 16)
BUDGET = 1 << 20


def content(sample: int) -> bytes:
    return (f"{sample}:".encode() * (1 + sample % 90))[: 1 + sample % 300]


def samples_of(ids: Sequence[int]) -> Samples:
    whole = [content(i) for i in ids]
    return Samples(
        ids=np.array(ids, dtype=np.int64),
        data=np.frombuffer(b"".join(whole), np.uint8).copy(),
        offsets=offsets_of(np.array([len(c) for c in whole], dtype=np.int64)),
        labels=np.array(ids, dtype=np.int64) % 7 - 3,
    )


def cache_at(path: Path, reference: DatasetReference = PHOTOS, budget: int = BUDGET) -> SampleCache:
    return SampleCache(CacheFolder.open(path, budget), reference, COUNT)


def found(cache: SampleCache, ids: Collection[int]) -> set[int]:
    """Which of ``ids`` the cache has; all that it gives is checked."""
    wanted, seen = np.array(list(ids), dtype=np.int64), []
    for rows, samples in cache.parts(wanted):
        assert samples.ids.tolist() == wanted[rows].tolist()
        assert samples.labels.tolist() == (samples.ids % 7 - 3).tolist()
        for place, sample in enumerate(samples.ids.tolist()):
            assert samples.sample(place).tobytes() == content(sample)
        seen += rows.tolist()
    assert seen == sorted(set(seen))
    return set(wanted[seen].tolist())


def files(path: Path, prefix: str = "segment-") -> list[Path]:
    return sorted(path.glob(f"*@*/{prefix}*"))


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def crash(cache: SampleCache) -> None:
    """Its process dies: the kernel closes its files and frees its locks."""
    cache._catalogue.close()
    if cache._users is not None:
        os.close(cache._users)
        cache._users = None
    cache._closed = cache._stopped = True
