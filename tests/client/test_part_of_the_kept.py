"""A part of the samples that is kept and read, where a disk is too slow for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.feature_tools import COUNT, KEY, content, features_at, labels, put

from hapi.client.caching.code_watch import CodeWatch
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.filling import ComputedRows, rows_where
from hapi.client.caching.sources import PassFeatures, byte_rows, in_part
from hapi.client.loading.buffers import BufferPool
from hapi.trace import Tracer
from hapi.wire.labels import SINGLE

IDS = np.arange(COUNT)


def test_a_part_is_as_large_as_it_says_and_holds_the_smaller_ones() -> None:
    ids = np.arange(100_000)
    for part in (0.0, 0.05, 0.3, 0.5, 0.9):
        assert in_part(ids, part).mean() == pytest.approx(part, abs=0.002)
    assert in_part(ids, 1.0).all() and not (in_part(ids, 0.3) & ~in_part(ids, 0.31)).any()
    assert np.array_equal(in_part(ids[::-1], 0.4)[::-1], in_part(ids, 0.4))


def test_only_the_part_is_read_and_its_features_are_right(tmp_path: Path) -> None:
    with features_at(tmp_path) as cache:
        put(cache, range(0, COUNT, 2))
        wanted = in_part(IDS, 0.5) & (IDS % 2 == 0)
        assert 5 < wanted.sum() < 25
        source = PassFeatures(
            cache,
            KEY.cut,
            torch.float32,
            SINGLE,
            BufferPool(),
            KeptCounts(),
            Tracer(),
            CodeWatch(),
            part=0.5,
        )
        held = source.held(IDS)
        kept = source.read(0, IDS, held)
        assert np.array_equal(held, wanted) and np.array_equal(kept.found, wanted)
        assert np.array_equal(byte_rows(kept.features)[wanted], content(IDS[wanted]))
        assert np.array_equal(kept.labels.numpy()[wanted], labels(IDS[wanted]))
        assert source.counts.bytes_read == int(wanted.sum()) * cache.sample_bytes


def test_rows_outside_of_the_part_are_left_out() -> None:
    rows = ComputedRows(IDS, torch.arange(COUNT * 2.0).reshape(COUNT, 2), labels(IDS))
    some = rows_where(rows, in_part(IDS, 0.5))
    assert np.array_equal(some.ids, IDS[in_part(IDS, 0.5)])
    assert torch.equal(some.features, rows.features[torch.from_numpy(some.ids)])
    assert rows_where(rows, in_part(IDS, 1.0)) is rows
