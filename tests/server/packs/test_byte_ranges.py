"""The header ``Range``: one range is served as the RFC has it, anything else is the whole object or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import RangeError
from hapi.server.packs.byte_ranges import wanted_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-", (10, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=90-1000", (90, 100)),
        ("Bytes= 5 - 6", (5, 7)),
    ],
)
def test_one_range(header: str, expected: tuple[int, int]) -> None:
    assert wanted_range(header, 100) == expected


@pytest.mark.parametrize(
    "header",
    [None, "", "bytes=", "bytes=-", "bytes=a-b", "bytes=7-6", "items=0-1", "bytes=٣-٤", "bytes=0x1-2"],
)
def test_what_is_no_range_means_the_whole(header: str | None) -> None:
    assert wanted_range(header, 100) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=0-1,5-6", "bytes=0-1,"])
def test_ranges_without_a_byte_and_several_are_refused(header: str) -> None:
    with pytest.raises(RangeError) as caught:
        wanted_range(header, 100)
    assert caught.value.size == 100


@given(st.text(max_size=30), st.integers(1, 1 << 40))
def test_no_text_asks_for_bytes_that_are_not_there(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        try:
            wanted = wanted_range(header, size)
        except RangeError:
            continue
        assert wanted is None or 0 <= wanted[0] < wanted[1] <= size
