"""The planner of loads: everything is brought once, in few ranges, with few bytes that nobody asked for."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.repository.checksums import CHECKED_BYTES
from hapi.repository.loading.plan import EXCESS_BYTES, MAX_EXCESS, ReadPlan, ReadTraits, Wanted, plan_reads

KB, MB = 1 << 10, 1 << 20
LOCAL = ReadTraits(8 * MB, 2, None)
REMOTE = ReadTraits(8 * MB, 8, 256 * KB)


@st.composite
def models(draw: st.DrawFn) -> list[Wanted]:
    """Tensors side by side or with gaps between them in a few packs, needed in any order, some of them twice."""
    sizes = st.one_of(st.integers(0, 300), st.integers(0, 3 * MB))
    wanted = []
    for pack in range(draw(st.integers(1, 3))):
        start = 8
        for _ in range(draw(st.integers(0, 12))):
            start += draw(st.one_of(st.just(0), st.integers(0, 2000), st.integers(0, MB)))
            nbytes = draw(sizes)
            wanted.append(Wanted(f"pack-{pack}", start, nbytes, f"{pack}-{start}-{nbytes}"))
            start += nbytes
    return draw(st.permutations(wanted + wanted[: draw(st.integers(0, 3))]))


TRAITS = st.builds(
    ReadTraits,
    st.integers(1, 8 * MB),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(0, MB)),
).filter(lambda traits: traits.range_bytes >= 64 * KB)


def slices_of(plan: ReadPlan, content: int) -> list[tuple[int, int, int, str]]:
    """First and last byte of each slice of a content, the position that its range gives it, and the pack."""
    found = []
    for read in plan.ranges:
        for part in read.slices:
            if part.content == content:
                found.append((part.start, part.start + part.nbytes, read.start, read.pack))
    return sorted(found)


@given(models(), TRAITS)
def test_every_byte_is_brought_once(wanted: list[Wanted], traits: ReadTraits) -> None:
    plan = plan_reads(wanted, traits)
    assert [plan.contents[n].digest for n in plan.content_of] == [tensor.digest for tensor in wanted]
    assert len(set(plan.contents)) == len(plan.contents) == len({t.digest for t in wanted})
    for number, content in enumerate(plan.contents):
        at = 0
        for start, stop, begins, pack in slices_of(plan, number):
            assert start == at and stop > start and pack == content.pack and begins <= content.start + start
            at = stop
        assert at == content.nbytes
    for read in plan.ranges:
        assert 0 < read.nbytes <= traits.range_bytes
        for part in read.slices:
            begin = plan.contents[part.content].start + part.start
            assert read.start <= begin and begin + part.nbytes <= read.stop
        if traits.gap_bytes is not None:
            assert read.stop - read.start <= traits.range_bytes


@pytest.mark.slow
@given(models(), TRAITS)
def test_no_more_than_a_hundredth_is_moved_in_vain(wanted: list[Wanted], traits: ReadTraits) -> None:
    plan = plan_reads(wanted, traits)
    assert plan.needed <= plan.moved <= plan.needed + max(EXCESS_BYTES, MAX_EXCESS * plan.needed)
    assert plan.needed == sum(content.nbytes for content in plan.contents)
    assert traits.gap_bytes is not None or plan.moved == plan.needed


@given(models(), TRAITS)
def test_what_is_needed_first_is_read_first(wanted: list[Wanted], traits: ReadTraits) -> None:
    plan = plan_reads(wanted, traits)
    firsts = [read.first for read in plan.ranges]
    assert firsts == sorted(firsts)
    seen: dict[int, int] = {}
    for read in plan.ranges:
        for part in read.slices:
            assert part.start >= seen.get(part.content, 0), "the slices of a content come in their order"
            seen[part.content] = part.start


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=7), st.integers(300, 300_000))
def test_no_other_choice_of_gaps_has_fewer_ranges(gaps: list[int], size: int) -> None:
    wanted, start = [], 8
    for number, gap in enumerate([0, *gaps]):
        start += gap
        wanted.append(Wanted("pack", start, size, str(number)))
        start += size
    excess = max(EXCESS_BYTES, int(MAX_EXCESS * size * len(wanted)))
    fewest = min(
        len(wanted) - count
        for count in range(len(gaps) + 1)
        for chosen in combinations(gaps, count)
        if sum(chosen) <= excess
    )
    assert len(plan_reads(wanted, ReadTraits(1 << 40, 8, 1 << 20)).ranges) == fewest


def side_by_side(sizes: list[int]) -> list[Wanted]:
    starts = [8 + sum(sizes[:n]) for n in range(len(sizes))]
    return [Wanted("pack", start, size, str(start)) for start, size in zip(starts, sizes, strict=True)]


def test_neighbours_are_one_run_that_readers_share_evenly() -> None:
    sizes = [1000, 64 * KB, 9 * MB, 40, 70 * MB]
    plan = plan_reads(side_by_side(sizes), REMOTE)
    assert len(plan.ranges) == 10 and plan.moved == sum(sizes)
    lengths = [read.stop - read.start for read in plan.ranges]
    assert max(lengths) - min(lengths) <= 10


@given(st.lists(st.integers(1, 40 * MB), min_size=1, max_size=12))
def test_one_reader_of_local_files_has_all_of_a_checksums_piece(sizes: list[int]) -> None:
    plan = plan_reads(side_by_side(sizes), LOCAL)
    for read in plan.ranges:
        for part in read.slices:
            left = sizes[part.content] - part.start
            assert part.start % CHECKED_BYTES == 0 and part.nbytes == min(CHECKED_BYTES, left)
    halves = -(-2 * sum(sizes) // LOCAL.range_bytes)
    assert len(plan.ranges) <= 2 * halves + 1, "small tensors and last pieces share a range"


def test_layers_1_to_s_of_any_s_are_one_run() -> None:
    sizes = [100 + 7 * n for n in range(30)]
    starts = [8 + sum(sizes[:n]) for n in range(30)]
    wanted = [Wanted("pack", start, size, str(start)) for start, size in zip(starts, sizes, strict=True)]
    for split in range(1, 31):
        assert len(plan_reads(wanted[:split], REMOTE).ranges) == 1
        assert len(plan_reads(wanted[split - 1 :], REMOTE).ranges) == 1


def test_a_gap_is_not_read_over_when_it_saves_no_range() -> None:
    wanted = [Wanted("pack", 8, 5 * MB, "a"), Wanted("pack", 8 + 5 * MB + 100, 5 * MB, "b")]
    plan = plan_reads(wanted, REMOTE)
    assert plan.moved == plan.needed and len(plan.ranges) == 2


def test_overlapping_tensors_are_brought_whole() -> None:
    wanted = [Wanted("pack", 8, 1000, "a"), Wanted("pack", 8, 400, "b"), Wanted("pack", 500, 1000, "c")]
    plan = plan_reads(wanted, ReadTraits(600, 1, 0))
    assert [sum(stop - start for start, stop, _, _ in slices_of(plan, n)) for n in range(3)] == [
        1000,
        400,
        1000,
    ]


def test_nothing_wanted_is_nothing_read() -> None:
    for traits in (LOCAL, REMOTE):
        assert plan_reads([], traits).ranges == ()
        assert plan_reads([Wanted("pack", 8, 0, "empty")], traits).ranges == ()
