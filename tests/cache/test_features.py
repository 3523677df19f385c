"""Tests of the cache of features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.wire.labels import SINGLE
from hapi.wire.references import DatasetReference, TransformSpec

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


def test_what_was_put_is_read(tmp_path: Path) -> None:
    ids = np.arange(10, dtype=np.int64)
    features = np.random.default_rng(0).integers(0, 256, (10, 32)).astype(np.uint8)
    labels = ids * 7
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 24), KEY, 20, SINGLE) as cache:
        cache.put(ids, features, labels)
        assert cache.share(np.arange(20)) == 0.5
        out, found_labels = np.zeros((3, 32), np.uint8), np.zeros(3, np.int64)
        found = cache.read(np.array([3, 15, 9]), out, found_labels)
        assert found.tolist() == [True, False, True]
        assert (out[[0, 2]] == features[[3, 9]]).all() and found_labels.tolist() == [21, 0, 63]
    other = replace(KEY, prefix="c" * 32)
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 24), other, 20, SINGLE) as cache:
        assert cache.share(ids) == 0
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 24), KEY, 20, SINGLE) as cache:
        assert cache.share(ids) == 1
