"""Rows of features in memory: a bound that holds, what fits stays, and nothing is replaced."""

from __future__ import annotations

import numpy as np
import pytest
from support.feature_tools import SAMPLE_BYTES, content, labels

from hapi.cache import memory_rows
from hapi.cache.memory_rows import MAX_DEFAULT_BYTES, MemoryRows, memory_bound
from hapi.wire.labels import SINGLE


@pytest.mark.parametrize("fitting", [0, 1, 7, 50])
def test_what_fits_is_kept_and_stays(fitting: int) -> None:
    bound, ids = fitting * (SAMPLE_BYTES + 8) + 5, np.random.default_rng(0).permutation(50)
    rows = MemoryRows(bound, 50, SAMPLE_BYTES, SINGLE)
    assert rows.nbytes <= bound
    for start in range(0, 50, 5):
        part = ids[start : start + 5]
        rows.add(
            np.concatenate([part, part]),
            content(np.concatenate([part, part])),
            labels(np.concatenate([part, part])),
        )
    assert rows.full and rows.held(ids).tolist() == [True] * fitting + [False] * (50 - fitting)
    features, found_labels = np.zeros((50, SAMPLE_BYTES), np.uint8), np.zeros(50, np.int64)
    found = rows.read(ids, features, found_labels)
    assert (found == rows.held(ids)).all()
    assert (features[found] == content(ids[found])).all() and (
        found_labels[found] == labels(ids[found])
    ).all()
    assert not features[~found].any()


def test_the_bound_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_bound(0) == 0 and memory_bound(5) == 5
    for free, bound in ((800, 100), (1 << 50, MAX_DEFAULT_BYTES), (None, MAX_DEFAULT_BYTES)):
        monkeypatch.setattr(memory_rows, "host_free_bytes", lambda free=free: free)
        assert memory_bound(None) == bound


def test_a_bound_beyond_the_machine() -> None:
    """Memory is taken as rows come; where the system refuses the room, nothing is kept in memory."""
    rows = MemoryRows(1 << 60, 1 << 22, 1 << 40, SINGLE)
    assert not rows.held(np.arange(3)).any()
