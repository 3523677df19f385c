"""Pieces copied without a Python step each are the pieces that a loop copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.store.gather import copy_ranges

SOURCE = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 9_000), st.sampled_from([0, 1, 2, 3, 7, 16, 100, 511, 1024, 5000])),
        max_size=30,
    ),
    gap=st.sampled_from([0, 0, 3]),
    equal=st.booleans(),
    rows=st.booleans(),
)
def test_as_a_loop_copies(pieces: list[tuple[int, int]], gap: int, equal: bool, rows: bool) -> None:
    starts = np.array([start for start, _ in pieces], dtype=np.int64)
    if rows and pieces:  # those of one array that begins anywhere
        starts += (starts[0] - starts) % max(1, pieces[0][1])
    lengths = np.array([pieces[0][1] if equal else length for _, length in pieces], dtype=np.int64)
    places = np.cumsum(lengths + gap) - lengths
    out = np.zeros(int((lengths + gap).sum()) + 1, dtype=np.uint8)
    expected = out.copy()
    for start, length, place in zip(starts, lengths, places, strict=True):
        expected[place : place + length] = SOURCE[start : start + length]
    copy_ranges(SOURCE, starts, lengths, out, places)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("start", "place"), [(-1, 0), (19_999, 0), (0, -1), (0, 9)])
def test_nothing_outside_is_touched(start: int, place: int) -> None:
    out = np.zeros(10, dtype=np.uint8)
    with pytest.raises(IndexError):
        copy_ranges(SOURCE, np.array([start]), np.array([2]), out, np.array([place]))
