"""Reads that are announced to the kernel: every one once and in order, never too many ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.process import read_ahead
from hapi.process.read_ahead import FileRange, announced


@given(st.lists(st.integers(1, 12 << 20), max_size=100))
def test_in_their_order_and_within_bounds(sizes: list[int]) -> None:
    told: list[int] = []

    def place_of(number: int) -> FileRange:
        return number, 0, sizes[number]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "announce", lambda place: told.append(place[0]))
        done = []
        for number in announced(range(len(sizes)), place_of):
            done.append(number)
            ahead = [n for n in told if n not in done]
            assert len(ahead) <= 32 and sum(sizes[n] for n in ahead) <= (16 << 20) + max(sizes)
            assert number in told or len(sizes) == 1
    assert done == list(range(len(sizes))) and told in (done, [])


def test_where_the_kernel_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.posix_fadvise", raising=False)
    assert list(announced([3, 1, 2], lambda n: (n, 0, 1))) == [3, 1, 2]
    read_ahead.announce((0, 0, 1))
