"""How datasets are cut into chunks: where groups and shards begin, whatever the numbers, and where each chunk lies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hapi.data.reading.chunk_layout import Grid, ShardLayout
from hapi.data.sample_directory import SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.wire.samples import offsets_of


def places_of(shards: list[list[int]], run: int = 3, shuffled: bool = False) -> ShardLayout:
    """Samples of these lengths by shard, one after the other or anyhow."""
    table = ShardTable.of(
        [
            Shard(key=f"s{n}", size=sum(lengths), checksum=0, count=len(lengths))
            for n, lengths in enumerate(shards)
        ]
    )
    directory, first = SampleDirectory.empty(sum(map(len, shards))), 0
    for number, lengths in enumerate(shards):
        order = (
            np.random.default_rng(number).permutation(len(lengths)) if shuffled else np.arange(len(lengths))
        )
        offsets = np.empty(len(lengths), dtype=np.int64)
        offsets[order] = offsets_of(np.array(lengths)[order])[:-1]
        directory.write(first, number, offsets, np.array(lengths))
        first += len(lengths)
    return ShardLayout(table, directory, np.full(len(shards), run))


SHARDS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=1, max_size=6)


@given(SHARDS, st.integers(1, 30), st.integers(1, 5))
def test_chunks_begin_where_groups_and_shards_do(shards: list[list[int]], group: int, parts: int) -> None:
    places = places_of(shards)
    grid, firsts = Grid(places, group, parts), places.firsts
    ids = np.arange(places.count)
    chunks = grid.chunks_of(ids, places.shards_of(ids))
    assert chunks[0] == 0 and chunks[-1] == grid.total - 1 and set(np.diff(chunks).tolist()) <= {0, 1}
    begins = set((np.flatnonzero(np.diff(chunks)) + 1).tolist()) | {0}
    held = -(-group // parts)
    inside = {first for first in range(places.count) if first % group % held == 0}
    assert begins == inside | set(firsts[:-1].tolist())
    for chunk in range(grid.total):
        shard, first, end = grid.samples(chunk)
        assert ids[chunks == chunk].tolist() == list(range(first, end))
        assert firsts[shard] <= first < end <= firsts[shard + 1]
    found, where, counts = grid.distinct(chunks[::2])
    assert found[where].tolist() == chunks[::2].tolist() and counts.sum() == len(chunks[::2])


@given(SHARDS, st.integers(1, 30), st.integers(1, 8), st.booleans())
def test_a_span_has_all_its_samples_and_whole_runs(
    shards: list[list[int]], group: int, run: int, shuffled: bool
) -> None:
    places = places_of(shards, run, shuffled)
    grid = Grid(places, group)
    for chunk in range(grid.total):
        span = grid.byte_range(chunk)
        origin, end = places.firsts[span.shard], places.firsts[span.shard + 1]
        there = places.directory.locate(np.arange(span.first, span.end))
        assert (span.start, span.stop) == (there.offset.min(), (there.offset + there.length).max())
        low, high = span.edges
        assert span.first <= low <= high <= span.end
        whole = [
            (head, min(head + run, end))
            for head in range(origin, end, run)
            if span.first <= head and min(head + run, end) <= span.end
        ]
        assert high - low == sum(stop - head for head, stop in whole) and len(span.starts) == len(whole)
        for (head, stop), start, last in zip(whole, span.starts, span.stops, strict=True):
            those = places.directory.locate(np.arange(head, stop))
            assert span.start + start == those.offset.min()
            assert span.start + last == (those.offset + those.length).max()
        if whole:
            assert (low, span.run) == (whole[0][0], (whole[0][0] - origin) // run)
