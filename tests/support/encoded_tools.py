"""A cache of features that shrink: half of them are zeros, and the others are known from their ids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hapi.arrays import Bytes, IntArray
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.wire.labels import SINGLE
from support.feature_tools import COUNT, KEY, labels

WIDTH = 512
WIDE = replace(KEY, shape=(WIDTH,))
ROW_BYTES = 4 * WIDTH


def rectified(ids: IntArray) -> Bytes:
    """Bytes of the features of samples ``ids``, as a ReLU gives them; uint8 [n, ROW_BYTES]."""
    rows = [np.random.default_rng(int(sample)).standard_normal(WIDTH).astype(np.float32) for sample in ids]
    return np.maximum(np.array(rows, np.float32).reshape(len(ids), WIDTH), 0).view(np.uint8)


def encoded_at(path: Path, codec: Any = "zeros", budget: int = 1 << 20, memory: int = 0) -> FeatureCache:
    return FeatureCache(CacheFolder.open(path, budget), WIDE, COUNT, SINGLE, memory, codec=codec)


def put_rows(cache: FeatureCache, ids: Collection[int]) -> None:
    wanted = np.array(list(ids), dtype=np.int64)
    cache.put(wanted, rectified(wanted), labels(wanted))


def found_rows(cache: FeatureCache, ids: Collection[int] = range(COUNT)) -> set[int]:
    """Which of ``ids`` the cache has; all that it gives is checked to the bit."""
    wanted = np.array(list(ids), dtype=np.int64)
    rows, read_labels = np.full((len(wanted), ROW_BYTES), 255, np.uint8), np.full(len(wanted), -99)
    present = cache.read(wanted, rows, read_labels)
    assert (rows[present] == rectified(wanted[present])).all()
    assert (read_labels[present] == labels(wanted[present])).all()
    return set(wanted[present].tolist())
