"""A cache of features that are known from their ids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.wire.labels import SINGLE
from hapi.wire.references import DatasetReference, TransformSpec

COUNT = 60
KEY = FeatureKey(
    dataset=DatasetReference(name="flowers", version="a" * 32),
    transform=TransformSpec(),
    prefix="b" * 32,
    cut=3,
    cut_name="relu",
    shape=(4, 2),
    dtype="float32",
    code="hapi 1",
)
OTHER = replace(KEY, prefix="c" * 32)
SAMPLE_BYTES = 32


def content(ids: IntArray) -> npt.NDArray[np.uint8]:
    """Bytes of the features, [n, 32], different for each id."""
    columns = np.arange(SAMPLE_BYTES)
    return ((ids[:, None] * 31 + columns * 7 + ids[:, None] * columns) % 251).astype(np.uint8)


def labels(ids: IntArray) -> IntArray:
    return ids * 7 - 3


def features_at(
    path: Path,
    budget: int = 1 << 20,
    memory: int = 0,
    key: FeatureKey = KEY,
    made_with: str = "",
) -> FeatureCache:
    return FeatureCache(CacheFolder.open(path, budget), key, COUNT, SINGLE, memory, made_with)


def put(cache: FeatureCache, ids: Collection[int]) -> None:
    wanted = np.array(list(ids), dtype=np.int64)
    cache.put(wanted, content(wanted), labels(wanted))


def found(cache: FeatureCache, ids: Collection[int] = range(COUNT)) -> set[int]:
    """Which of ``ids`` the cache has; all that it gives is checked."""
    wanted = np.array(list(ids), dtype=np.int64)
    rows, read_labels = np.full((len(wanted), SAMPLE_BYTES), 255, np.uint8), np.full(len(wanted), -99)
    there = cache.read(wanted, rows, read_labels)
    assert (rows[there] == content(wanted[there])).all()
    assert (read_labels[there] == labels(wanted[there])).all()
    return set(wanted[there].tolist())
