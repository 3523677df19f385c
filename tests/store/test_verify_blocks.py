"""The stretches in which a shard is verified: every byte once, every sample whole, however they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.data import verify


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "BLOCK_BYTES", 64)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 300)), max_size=60),
)
def test_bytes_once_and_samples_whole(size: int, samples: list[tuple[int, int]]) -> None:
    starts = np.array([min(start, size - 1) for start, _ in samples], dtype=np.int64)
    stops = np.minimum(starts + np.array([length for _, length in samples], dtype=np.int64), size)
    longest = int((stops - starts).max()) if samples else 0
    covered, seen = 0, []
    for begin, end, members in verify._blocks(starts, stops, size):
        assert begin <= covered and begin < end <= size
        assert end - begin <= 64 + longest
        assert (starts[members] >= begin).all() and (stops[members] <= end).all()
        covered = max(covered, end)
        seen += members.tolist()
    assert covered == size and sorted(seen) == list(range(len(samples)))
