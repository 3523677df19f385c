"""The sample directory: what goes in comes out, bounds hold, and a wrong place is one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.data.sample_directory import ENTRY, MAX_OFFSET, MAX_SAMPLE_BYTES, MAX_SHARD, SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.errors import DataError, UsageError
from hapi.wire.samples import offsets_of

_places = st.tuples(st.integers(0, MAX_SHARD), st.integers(0, MAX_OFFSET), st.integers(1, MAX_SAMPLE_BYTES))


def shard(number: int, size: int, count: int) -> Shard:
    return Shard(key=f"shard-{number:05d}.bin", size=size, checksum=0, count=count)


def columns(places: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    return [p[0] for p in places], [p[1] for p in places], [p[2] for p in places]


@given(st.lists(_places, min_size=1, max_size=50), st.data())
def test_locate_equals_a_dict(places: list[tuple[int, int, int]], data: st.DataObject) -> None:
    naive = dict(enumerate(places))
    directory = SampleDirectory.empty(len(places))
    cut = data.draw(st.integers(0, len(places)))
    for first, some in ((0, places[:cut]), (cut, places[cut:])):
        directory.write(first, *columns(some))
    stored = directory.words().tobytes()
    assert len(stored) == 16 * len(places)
    again = SampleDirectory.from_words(np.frombuffer(stored, dtype=np.uint64).reshape(-1, 2))
    ids = data.draw(st.lists(st.integers(0, len(places) - 1), max_size=100))
    found = again.locate(np.array(ids, dtype=np.int64))
    assert (found.shard.dtype, found.offset.dtype, found.length.dtype) == (np.uint32, np.int64, np.int64)
    assert found.shard.flags.c_contiguous and len(found) == len(ids)
    rows = zip(found.shard.tolist(), found.offset.tolist(), found.length.tolist(), strict=True)
    assert list(rows) == [naive[i] for i in ids]


def test_the_words_are_those_that_are_documented() -> None:
    directory = SampleDirectory.empty(1)
    directory.write(0, 3, [5], [7])
    assert directory.words().tolist() == [[5, 7 << 32 | 3]]
    assert ENTRY.itemsize == 16


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("shard", (MAX_SHARD + 1, 0, 1)),
        ("shard", (-1, 0, 1)),
        ("offset", (0, MAX_OFFSET + 1, 1)),
        ("offset", (0, -1, 1)),
        ("length", (0, 0, MAX_SAMPLE_BYTES + 1)),
        ("length", (0, 0, 0)),
    ],
)
def test_a_place_that_no_entry_can_hold_is_refused(name: str, place: tuple[int, int, int]) -> None:
    directory = SampleDirectory.empty(10)
    directory.write(0, *columns([(MAX_SHARD, MAX_OFFSET, MAX_SAMPLE_BYTES)] * 10))
    before = directory.words().copy()
    with pytest.raises(UsageError, match=rf"sample 6: its {name} is -?\d+, the directory holds [01] to \d+"):
        directory.write(5, *columns([(0, 0, 1), place]))
    assert np.array_equal(directory.words(), before)


_shards = st.lists(st.lists(st.integers(1, 2**20), min_size=1, max_size=20), min_size=1, max_size=5)


def laid_out(shards: list[list[int]]) -> tuple[SampleDirectory, ShardTable]:
    """Shards whose samples lie one after the other."""
    directory, first = SampleDirectory.empty(sum(len(s) for s in shards)), 0
    for number, lengths in enumerate(shards):
        directory.write(first, number, offsets_of(np.array(lengths))[:-1], lengths)
        first += len(lengths)
    return directory, ShardTable.of([shard(n, sum(s), len(s)) for n, s in enumerate(shards)])


@given(_shards)
def test_a_sound_directory_passes(shards: list[list[int]]) -> None:
    directory, listed = laid_out(shards)
    directory.check(listed, "index", "index it again")


@given(_shards, st.data())
def test_any_place_outside_of_its_shard_is_named(shards: list[list[int]], data: st.DataObject) -> None:
    """A flipped bit is found whenever it makes a sample stick out of its shard, and only then."""
    directory, listed = laid_out(shards)
    position = data.draw(st.integers(0, len(directory) - 1))
    word = data.draw(st.integers(0, 1))
    directory.words()[position, word] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    at = directory.entries[position]
    owner = int(np.searchsorted(listed.firsts, position, "right")) - 1
    offset, length = int(at["offset"]), int(at["length"])
    inside = int(at["shard"]) == owner and length > 0 and offset + length <= listed[owner].size
    if inside:
        directory.check(listed, "index", "index it again")
    else:
        with pytest.raises(
            DataError, match=rf"^index: sample {position} in shard shard-0000{owner}\.bin has"
        ):
            directory.check(listed, "index", "index it again")


def _set(field: str, value: int) -> Callable[[SampleDirectory], None]:
    def change(directory: SampleDirectory) -> None:
        directory.entries[field][70_003] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("offset", 65_000), "has bytes 65000..65001, but the shard only 65000"),
        (_set("length", 0), "has no bytes"),
        (_set("length", 2**32 - 1), "has bytes 5003..4294972298, but the shard only 65000"),
        (_set("shard", 0), "has its place in shard number 0 instead of 1"),
        (_set("shard", 2), "has its place in shard number 2 instead of 1"),
        (_set("offset", 5003 | 0x8001 << 48), "has flags (0x8001) that this version of Hapi does not know"),
        (_set("offset", 2**64 - 1), "has flags (0xffff) that this version of Hapi does not know"),
    ],
)
def test_each_fault_has_its_message(change: Callable[[SampleDirectory], None], message: str) -> None:
    """Past the first stretch that is checked at once, in the middle of a later shard."""
    directory, listed = laid_out([[1] * 65_000] * 2)
    change(directory)
    with pytest.raises(
        DataError, match=re.escape(f"sample 70003 in shard shard-00001.bin {message}; index it again")
    ):
        directory.check(listed, "index", "index it again")


def test_counts_that_do_not_match() -> None:
    directory, listed = laid_out([[3, 4], [5]])
    with pytest.raises(DataError, match="places of 3 samples, the shards have 2"):
        directory.check(ShardTable.of([listed[0]]), "index", "")
    with pytest.raises(DataError, match=r"sample 1 in shard shard-00001.bin has its place in shard number 0"):
        directory.check(ShardTable.of([shard(0, 7, 1), shard(1, 5, 2)]), "index", "")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 9), st.data())
def test_places_that_are_computed_are_those_of_the_entries(
    counts: list[int], begin: int, length: int, data: st.DataObject
) -> None:
    """Whether all shards have as many samples or not, and whether one of the samples lies elsewhere or not."""
    if data.draw(st.booleans()):
        counts = [max(counts)] * (len(counts) - 1) + [min(counts)]
    table = ShardTable.of([shard(i, begin + 9 * length + 9, count) for i, count in enumerate(counts)])
    directory = SampleDirectory.empty(sum(counts))
    for number, count in enumerate(counts):
        offsets = begin + length * np.arange(count)
        directory.write(int(table.firsts[number]), number, offsets, np.full(count, length))
    odd = data.draw(st.none() | st.integers(0, len(directory) - 1))
    if odd is not None:
        directory.entries[data.draw(st.sampled_from(["offset", "length"]))][odd] += 1
    ids = np.array(data.draw(st.lists(st.integers(0, len(directory) - 1), max_size=20)), dtype=np.int64)
    read = directory.locate(ids)
    directory.check(table, "index", "again")
    computed = directory.locate(ids)
    alike = len(set(counts[:-1])) < 2 and counts[-1] <= counts[0]
    # A single sample lies at its place and has its length, whatever these are.
    assert (directory.regular is not None) == (alike and (odd is None or len(directory) == 1))
    for field in ("shard", "offset", "length"):
        mine, theirs = getattr(computed, field), getattr(read, field)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert computed.shard.flags.c_contiguous


def test_what_is_written_later_is_not_computed() -> None:
    directory, table = laid_out([[4, 4], [4, 4]])
    directory.check(table, "index", "again")
    assert directory.regular is not None
    directory.write(3, 1, [5], [3])
    assert directory.regular is None and directory.locate(np.array([3])).offset.tolist() == [5]


def test_samples_may_lie_over_one_another_and_apart() -> None:
    directory = SampleDirectory.empty(4)
    directory.write(0, [0, 0, 0, 1], [50, 0, 10, 0], [50, 90, 1, 1])
    directory.check(ShardTable.of([shard(0, 100, 3), shard(1, 100, 1)]), "index", "")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.data())
def test_shards_of_few_samples(counts: list[int], data: st.DataObject) -> None:
    """Every boundary between shards is where the counts say; one sample given to the neighbour is found."""
    directory, listed = laid_out([[1] * count for count in counts])
    directory.check(listed, "index", "index it again")
    position = data.draw(st.integers(0, len(directory) - 1))
    entries: Any = directory.entries
    entries["shard"][position] += np.uint32(1)
    with pytest.raises(DataError, match=rf"sample {position} in"):
        directory.check(listed, "index", "index it again")


@given(st.binary(min_size=16, max_size=400), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_bytes_are_a_data_error_or_lie_within_their_shards(data: bytes, counts: list[int]) -> None:
    words = np.frombuffer(data[: len(data) // 16 * 16], dtype=np.uint64).reshape(-1, 2)
    directory = SampleDirectory.from_words(words)
    listed = ShardTable.of([shard(number, 2**40, count) for number, count in enumerate(counts)])
    try:
        directory.check(listed, "index", "index it again")
    except DataError as error:
        assert str(error).startswith("index: ")
        return
    found = directory.locate(np.arange(len(directory)))
    assert ((found.offset >= 0) & (found.length > 0) & (found.offset + found.length <= 2**40)).all()
