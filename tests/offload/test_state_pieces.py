"""Pieces hold every element once, within their bounds, on the drives in turn."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hapi.offload.pieces import ParameterSize, plan_pieces
from hapi.process.direct_io import ALIGNMENT

SIZES = st.lists(st.builds(ParameterSize, st.integers(0, 5000), st.integers(0, 3)), max_size=40)


@given(SIZES, st.integers(1, 4), st.integers(16, 2000))
def test_every_element_is_in_one_piece(sizes: list[ParameterSize], drives: int, most: int) -> None:
    layout = plan_pieces(sizes, drives, most)
    found: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for piece in layout.pieces:
        assert sum(segment.elements for segment in piece.segments) <= most
        for segment in piece.segments:
            found[segment.parameter].append((segment.start, segment.stop))
    for size, spans in zip(sizes, found, strict=True):
        ends = [0, *(stop for _, stop in sorted(spans))]
        assert [start for start, _ in sorted(spans)] == ends[:-1]
        assert ends[-1] == size.elements


@given(SIZES, st.integers(1, 4), st.integers(16, 2000))
def test_records_do_not_overlap_and_are_aligned(sizes: list[ParameterSize], drives: int, most: int) -> None:
    layout = plan_pieces(sizes, drives, most)
    ends = [0] * drives
    for number, piece in enumerate(layout.pieces):
        assert piece.number == number
        assert piece.drive == number % drives
        assert piece.at == ends[piece.drive]
        ends[piece.drive] += piece.nbytes
        assert (
            not piece.at % ALIGNMENT and not piece.states_bytes % ALIGNMENT and not piece.nbytes % ALIGNMENT
        )
        spans = [(at, at + 4 * segment.elements) for segment in piece.segments for at in segment.states_at]
        masters = [
            (segment.master_at, segment.master_at + 4 * segment.elements) for segment in piece.segments
        ]
        assert all(stop <= piece.states_bytes for _, stop in spans)
        assert all(start >= piece.states_bytes for start, _ in masters)
        ordered = sorted(spans + masters)
        assert all(one[1] <= two[0] for one, two in pairwise(ordered))
        assert not ordered or ordered[-1][1] <= piece.nbytes
        for segment in piece.segments:
            assert len(segment.states_at) == sizes[segment.parameter].columns
    assert tuple(ends) == layout.slot_bytes


def test_gradients_come_from_the_last_parameter_on() -> None:
    layout = plan_pieces([ParameterSize(1000, 2)] * 5, 1, 1000)
    assert [piece.segments[0].parameter for piece in layout.pieces] == [4, 3, 2, 1, 0]
