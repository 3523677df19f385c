"""Records on their way to a segment: written from where they are, however little a system takes at once."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cache_tools import cache_at, found, samples_of
from support.feature_tools import KEY, SAMPLE_BYTES

from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.wire.labels import SINGLE


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_a_system_that_takes_a_part_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    write = os.pwritev

    def part(descriptor: int, buffers: Sequence[memoryview], start: int) -> int:
        """Write no more than ``most`` bytes."""
        return write(descriptor, [b"".join(buffers)[:most]], start)

    monkeypatch.setattr(os, "pwritev", part)
    with cache_at(tmp_path) as cache:
        cache.put(samples_of(range(40)))
    monkeypatch.undo()
    with cache_at(tmp_path) as cache:
        assert found(cache, range(60)) == set(range(40))


def test_more_records_than_a_system_takes_at_once(tmp_path: Path) -> None:
    count = 3000
    ids = np.arange(count)
    content = np.random.default_rng(0).integers(0, 256, (count, SAMPLE_BYTES), dtype=np.uint8)
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 24), KEY, count, SINGLE) as cache:
        cache.put(ids, content, ids)
        rows, labels = np.empty_like(content), np.empty(count, np.int64)
        assert cache.read(ids, rows, labels).all()
        assert (rows == content).all() and (labels == ids).all()


def test_a_put_takes_no_memory_for_the_content(tmp_path: Path) -> None:
    """Sixteen features of 1 MB, once the cache was used: heads and locations are all that is made."""
    count, nbytes = 32, 1 << 20
    key = replace(KEY, shape=(nbytes // 4,))
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 30), key, count, SINGLE, codec="none") as cache:
        for first in (0, 16):
            ids = np.arange(first, first + 16)
            content = np.zeros((16, nbytes), np.uint8)
            tracemalloc.start()
            cache.put(ids, content, ids)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert cache.held(ids).all() and peak < nbytes / 4
