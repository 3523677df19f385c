"""The reader: the same bytes by every way, each chunk read once, damage named, nothing kept too long."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import CountingStore

from hapi.data.dataset import Dataset, find_dataset
from hapi.data.epoch_order import EpochOrder, Shuffle
from hapi.data.manifest import SampleLayout
from hapi.data.reading.chunk_cache import ABSENT, Area, ChunkCache
from hapi.data.reading.read_cost import LOCAL_COST, REMOTE_COST
from hapi.data.reading.reader import AccessHint
from hapi.errors import DataError, HapiError, StoreError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.base import Source

SLOT = LOCAL_COST.slot_bytes


class MixedSource(Source):
    """Samples of the given lengths, with known bytes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.description = "mixed"
        generator = np.random.default_rng(3)
        self.samples = [generator.bytes(length) for length in lengths]
        self.labels = np.arange(len(lengths), dtype=np.int64) % 2
        self.classes = ("a", "b")
        self.layout = SampleLayout(kind="tensor", sample_shape=(1,), sample_dtype="uint8")

    def sample(self, number: int) -> bytes:
        return self.samples[number]

    def content_key(self) -> bytes:
        return b"".join(self.samples)


def packed(tmp_path: Path, lengths: Sequence[int]) -> tuple[MixedSource, CountingStore]:
    source, store = MixedSource(lengths), CountingStore(tmp_path / "store")
    pack(source, store, "d", PackOptions(shard_bytes=1 << 20))
    return source, store


def opened(store: CountingStore, slots: int) -> Dataset:
    dataset = find_dataset(store, "d", cache=ChunkCache(slots * SLOT, SLOT))
    store.ranges.clear()
    return dataset


Packed = Callable[[], tuple[MixedSource, CountingStore]]
"""A dataset that is packed once for all tests, under a store of its own for each that asks."""


def packed_once(folder: Path, count: int) -> Packed:
    """Samples of 512 bytes, 2048 of them in a shard."""
    source, _ = packed(folder, [512] * count)
    return lambda: (source, CountingStore(folder / "store"))


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed_once(tmp_path_factory.mktemp("equal"), 20_000)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed_once(tmp_path_factory.mktemp("many"), 40_000)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[MixedSource, CountingStore]:
    """3 MB in three shards: mostly small samples, some larger than a chunk's room."""
    lengths = np.random.default_rng(1).integers(1, 3000, 2000)
    lengths[::500] = SLOT + 7
    return packed(tmp_path_factory.mktemp("mixed"), lengths.tolist())


@settings(max_examples=25)
@given(
    ids=st.lists(st.integers(0, 1999), max_size=300),
    slots=st.sampled_from([0, 1, 3, 100]),
    group=st.sampled_from([0, 7, 100, 1000]),
)
def test_same_bytes_by_every_way(
    mixed: tuple[MixedSource, CountingStore], ids: list[int], slots: int, group: int
) -> None:
    source, store = mixed
    dataset = opened(store, slots)
    for _ in range(2):
        read = dataset.read(
            np.array(ids, dtype=np.int64), AccessHint(group, frozenset([0, 2]), 3) if group else None
        )
        assert read.data.tobytes() == b"".join(source.samples[i] for i in ids)
        assert [read.sample(k).tobytes() for k in range(len(ids))] == [source.samples[i] for i in ids]


@pytest.mark.slow
def test_an_epoch_of_chunk_windows_reads_every_chunk_once(equal: Packed) -> None:
    source, store = equal()
    dataset = opened(store, 12)  # of 40 chunks
    order = Shuffle(512, 4).sequence(1, 0, 20_000)
    near = dataset.reader.order_hint(order)
    assert near
    for first in range(0, len(order), 256):
        ids = order[first : first + 256]
        assert dataset.read(ids, near).data.tobytes() == b"".join(source.samples[i] for i in ids)
    assert len(set(store.ranges)) == 40
    assert len(store.ranges) <= 40 + 3, "nobody said which chunks are open over the end of the epoch"
    assert sum(stop - start for _, start, stop in set(store.ranges)) == 20_000 * 512
    assert max(store.sizes) <= SLOT


@pytest.mark.slow
@pytest.mark.parametrize(("group", "slots"), [(100, 24), (333, 24), (700, 24), (1_200, 48)])
def test_windows_of_any_samples_read_every_group_once(tmp_path: Path, group: int, slots: int) -> None:
    """Neither shards nor mean lengths need to fit the groups: chunks are cut where groups begin."""
    lengths = np.random.default_rng(2).integers(50, 1_500, 12_000)
    source, store = packed(tmp_path, lengths.tolist())
    dataset = opened(store, slots)
    order = Shuffle(group, 4).sequence(1, 0, 12_000)
    near = dataset.reader.access_hint(Shuffle(group, 4), 1, 0)
    assert near is not None and near.group == group
    for first in range(0, len(order), 256):
        ids = order[first : first + 256]
        assert dataset.read(ids, near).data.tobytes() == b"".join(source.samples[i] for i in ids)
    assert store.bytes_read == lengths.sum()
    assert max(store.sizes) <= SLOT


def test_what_is_held_out_costs_no_chunk_twice(equal: Packed) -> None:
    """A training's order over a part of the samples: the chunks are those of the whole dataset."""
    _, store = equal()
    dataset = opened(store, 12)
    ids = np.flatnonzero(np.random.default_rng(0).random(20_000) < 0.8)
    order = EpochOrder(seed=1, shuffle=Shuffle(512, 4))
    for epoch in range(3):
        near = dataset.reader.access_hint(order.shuffle, 1, epoch)
        for batch in order.batches(epoch, ids, 20_000, 64):
            dataset.read(batch, near)
    assert len(store.ranges) <= 3 * 40


def test_chunks_open_over_the_end_of_an_epoch_are_read_once(equal: Packed) -> None:
    _, store = equal()
    dataset = opened(store, 12)  # of 40 chunks
    for epoch in range(2):
        order = Shuffle(512, 4).sequence(1, epoch, 20_000)
        near = dataset.reader.access_hint(Shuffle(512, 4), 1, epoch)
        store.ranges.clear()
        for first in range(0, len(order), 256):
            dataset.read(order[first : first + 256], near)
        assert len(store.ranges) <= 40
        assert len(set(store.ranges)) == len(store.ranges)


def test_two_jobs_keep_what_each_needs_again(equal: Packed) -> None:
    _, store = equal()
    dataset = opened(store, 24)
    orders = [Shuffle(512, 4).sequence(seed, 0, 20_000) for seed in range(2)]
    nears = [dataset.reader.access_hint(Shuffle(512, 4), seed, 0, sharers=2) for seed in range(2)]
    for first in range(0, 20_000, 256):
        for order, near in zip(orders, nears, strict=True):
            dataset.read(order[first : first + 256], near)
    assert len(store.ranges) <= 2 * 40


def test_two_jobs_come_by_with_less_than_the_double_of_their_windows(equal: Packed) -> None:
    _, store = equal()
    dataset = opened(store, 13)
    orders = [Shuffle(512, 4).sequence(seed, 0, 20_000) for seed in range(2)]
    nears = [dataset.reader.access_hint(Shuffle(512, 4), seed, 0, sharers=2) for seed in range(2)]
    assert all(nears)
    for first in range(0, 20_000, 256):
        for order, near in zip(orders, nears, strict=True):
            dataset.read(order[first : first + 256], near)
    assert len(store.ranges) <= 2 * 44
    assert len(set(store.sizes)) <= 2, "whole chunks"


@pytest.mark.parametrize(("length", "slots"), [(1_728, 36), (1_758, 36), (1_812, 40)])
def test_chunks_of_every_length_find_room_in_every_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, slots: int
) -> None:
    """An object store at 1/1024 of its size: five float32 of 3 x 384 x 384 are a chunk of 8 MiB."""
    cost = replace(REMOTE_COST, chunk_bytes=8 << 10, small_bytes=2 << 10)
    monkeypatch.setattr("hapi.data.reading.reader.read_cost", lambda store: cost)
    monkeypatch.setattr("hapi.data.reading.reader.ROWS_LIMIT", 16)
    _, store = packed(tmp_path, [length] * 1_200)
    dataset = find_dataset(store, "d", cache=ChunkCache(slots * cost.slot_bytes, cost.slot_bytes))
    shuffle = dataset.reader.default_shuffle
    assert shuffle == Shuffle(5, 10)
    for epoch in range(4):
        near = dataset.reader.access_hint(shuffle, 1, epoch)
        assert near is not None
        store.ranges.clear()
        for first in range(0, 1_200, 40):
            dataset.read(shuffle.sequence(1, epoch, 1_200)[first : first + 40], near)
        assert len(store.ranges) <= 245
    for group in range(1, 100):
        assert -(-group // dataset.reader._parts(group)) * length <= cost.slot_bytes


@pytest.mark.slow
def test_what_is_in_no_windows_is_not_read_whole(many: Packed) -> None:
    """Ids from everywhere, said to be of one chunk: no client has a server read a thousand times what it sends."""
    _, store = many()
    dataset = opened(store, 12)  # of 80 chunks
    near = dataset.reader.access_hint(Shuffle(512, 1), 0, 0)
    scattered = np.random.default_rng(0).permutation(80)[:40] * 500
    dataset.read(scattered, near)
    assert store.bytes_read < 10 * 40 * 512
    store.ranges.clear()
    dataset.read(np.arange(1_600, 1_700), near)
    assert store.sizes == [512 * 512], "what is in them is"


def test_many_groups_of_one_data_set(equal: Packed) -> None:
    """Jobs with groups of their own share the cache, and none has its chunks forgotten for another's sake."""
    _, store = equal()
    dataset = opened(store, 96)
    shuffles = [Shuffle(group, 4) for group in range(500, 508)]
    orders = [shuffle.sequence(1, 0, 20_000) for shuffle in shuffles]
    nears = [dataset.reader.access_hint(shuffle, 1, 0, sharers=8) for shuffle in shuffles]
    for first in range(0, 20_000, 512):
        for order, near in zip(orders, nears, strict=True):
            assert near is not None
            dataset.read(order[first : first + 512], near)
    assert store.bytes_read < 1.3 * 8 * 20_000 * 512


def test_chunks_of_groups_that_are_forgotten_leave_the_cache(
    equal: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.data.reading.reader._FEW_CHUNKS", 1)
    source, store = equal()
    cache = ChunkCache(24 * SLOT, SLOT)
    dataset = find_dataset(store, "d", cache=cache)
    areas = []
    for group in range(400, 420):
        assert dataset.read(np.arange(900), AccessHint(group)).data.tobytes() == b"".join(
            source.samples[:900]
        )
        areas.append(weakref.ref(dataset.reader._grids[group].area))
    gc.collect()
    assert sum(area() is not None for area in areas) <= 4
    assert not dataset.reader.access_hint(Shuffle(60, 1), 0, 0), "more chunks than are remembered at all"


def test_groups_that_are_no_use_for_reading(equal: Packed) -> None:
    _, store = equal()
    reader = opened(store, 12).reader

    def near(group: int, window: int, sharers: int = 1) -> AccessHint | None:
        return reader.access_hint(Shuffle(group, window), 0, 0, sharers)

    assert not near(4, 2), "2 KB: not worth a range"
    assert near(512, 6) == AccessHint(512, open_chunks=6), "there is no room to keep anything"
    assert not near(512, 7), "more may be open than there is room for"
    assert near(512, 4, sharers=2) == AccessHint(512, frozenset(), 2, 4), (
        "two come by with less than the double"
    )
    assert not near(512, 5, sharers=2)
    assert not near((1 << 31) - 1, 1)
    whole = near(1_024, 3)
    assert whole and whole.group == 1_024, "two chunks to a group"
    assert not near(1_024, 4)
    kept = near(512, 4)
    assert kept and len(kept.revisited_groups) == 3


def test_full_permutation_far_larger_than_the_cache_reads_no_chunks(many: Packed) -> None:
    _, store = many()
    dataset = opened(store, 4)  # of 80 chunks
    order = Shuffle().sequence(1, 0, 40_000)
    assert not dataset.reader.order_hint(order)
    for first in range(0, 8_000, 32):
        dataset.read(order[first : first + 32])
    assert store.bytes_read < 1.5 * 8_000 * 512


def test_without_a_hint_windows_are_found(equal: Packed) -> None:
    """At most twice what a reader that knows the order takes: directly what a chunk costs, and then the chunk."""
    _, store = equal()
    dataset = opened(store, 12)
    order = Shuffle(512, 4).sequence(1, 0, 20_000)
    for first in range(0, len(order), 32):
        dataset.read(order[first : first + 32])
    chunks = sum(size > 100_000 for size in store.sizes)
    direct = len(store.ranges) - chunks
    assert 40 <= chunks <= 44  # two shards of a MiB hold 2048 samples, four chunks each
    assert direct <= 2 * chunks * LOCAL_COST.rent(512, LOCAL_COST.chunk_bytes)


def test_two_readers_load_a_chunk_once(tmp_path: Path) -> None:
    source, store = packed(tmp_path, [512] * 400)
    dataset = opened(store, 4)
    store.gate = threading.Event()
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(dataset.read(np.array([i])).data.tobytes()))
        for i in range(4)
    ]
    threads[0].start()
    assert store.entered.wait(240)
    for thread in threads[1:]:
        thread.start()
    store.gate.set()
    for thread in threads:
        thread.join(240)
    assert sorted(found) == sorted(source.samples[:4])
    assert store.ranges == [(store.ranges[0][0], 0, 400 * 512)]


def test_chunks_are_announced_a_piece_before_they_are_read(
    equal: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store = equal()
    dataset = opened(store, 60)
    told: list[tuple[int, list[tuple[str, int, int]]]] = []
    monkeypatch.setattr(store, "announce", lambda ranges: told.append((len(store.ranges), list(ranges))))
    dataset.read(np.arange(20_000), hint=AccessHint(dataset.reader.default_shuffle.group))
    announced = [one for _, ranges in told for one in ranges]
    assert announced == store.ranges and len(announced) == 40
    assert [before for before, _ in told] == [0, 0, 8, 16, 24]  # pieces of 4096 samples in 8 chunks each
    dataset.read(np.arange(20_000), hint=AccessHint(dataset.reader.default_shuffle.group))
    assert not any(ranges for _, ranges in told[5:]), "what is cached is not announced"


def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source, store = packed(tmp_path, [512] * 400)
    dataset = opened(store, 1)
    store.fail = lambda: True
    for _ in range(3):
        with pytest.raises(StoreError, match="is down"):
            dataset.read(np.array([1]))
    store.fail = lambda: False
    assert dataset.read(np.array([1])).data.tobytes() == source.samples[1]


def test_a_load_that_fails_half_way_keeps_what_was_read(tmp_path: Path) -> None:
    """Right bytes from the chunks that came before the failure, also where these are not their shard's first."""
    source, store = packed(tmp_path, [512] * 2_000)
    dataset = opened(store, 8)  # of 4 chunks
    near = AccessHint(dataset.reader.default_shuffle.group)
    store.fails_after = 3
    with pytest.raises(StoreError, match="went down"):
        dataset.read(np.arange(2_000), near)
    store.fails_after = None
    store.ranges.clear()
    assert dataset.read(np.arange(2_000), near).data.tobytes() == b"".join(source.samples)
    assert len(store.ranges) == 1, "the other three are there"


def test_damage_is_named_and_its_neighbours_stay_readable(tmp_path: Path) -> None:
    source, store = packed(tmp_path, [512] * 400)
    key = find_dataset(store, "d").shard_key(0)
    data = bytearray(store.get(key))
    data[512 * 7 + 3] ^= 1
    store.put(key, data)
    dataset = opened(store, 4)
    for _ in range(2):
        others = [6, 8, 399]
        assert dataset.read(np.array(others)).data.tobytes() == b"".join(source.samples[i] for i in others)
        with pytest.raises(DataError, match=r"sample 7 in shard shard-00000\.bin fails its checksum"):
            dataset.read(np.array([5, 7]))


def test_a_chunk_read_again_is_checked_again(tmp_path: Path) -> None:
    _, store = packed(tmp_path, [512] * 2_000)
    dataset = opened(store, 1)  # of 4 chunks
    every = np.arange(2_000)
    dataset.read(every, hint=AccessHint(dataset.reader.default_shuffle.group))
    key = dataset.shard_key(0)
    data = bytearray(store.get(key))
    data[512 * 700] ^= 1
    store.put(key, data)
    with pytest.raises(HapiError, match="sample 700 in shard"):
        for first in range(0, 2_000, 500):
            dataset.read(every[first : first + 500], hint=AccessHint(dataset.reader.default_shuffle.group))


def test_slots_in_use_are_never_taken() -> None:
    cache, area = ChunkCache(2 * 16, 16), Area(5)
    wanted = np.ones(2, dtype=np.bool_)
    first = cache.reserve(area, np.array([0, 1]), wanted)
    cache.publish(first.slots, np.array([True, True]))
    second = cache.reserve(area, np.array([1, 2]), wanted)
    assert second.slots[0] == first.slots[1] and second.slots[1] == ABSENT and not second.mine.any()
    cache.release(first)
    third = cache.reserve(area, np.array([3, 4]), wanted)  # chunk 1 is still held
    assert sorted(third.slots.tolist()) == sorted([ABSENT, first.slots[0]])
    cache.publish(third.slots[third.mine], np.array([False]))
    assert (cache.wait(third) == ABSENT).all() and area.slot_of.tolist() == [-1, first.slots[1], -1, -1, -1]
    cache.release(third)
    cache.release(second)
    assert cache.reserve(area, np.array([3, 4]), wanted).mine.all()


def loaded(cache: ChunkCache, area: Area, *chunks: int, keep: int = 0) -> None:
    """Claim these chunks as a reader does that finds all of them sound."""
    claim = cache.reserve(area, np.array(chunks), np.ones(len(chunks), dtype=np.bool_))
    cache.publish(claim.slots[claim.mine], np.ones(int(claim.mine.sum()), dtype=np.bool_))
    if keep:
        cache.keep(claim.slots, keep)
    cache.release(claim)


def test_what_is_kept_goes_last_and_not_for_ever() -> None:
    cache, area = ChunkCache(6 * 16, 16), Area(100)
    loaded(cache, area, 0, 1, keep=20)
    for chunk in range(2, 22):
        loaded(cache, area, chunk)
        assert (area.slot_of[:2] != ABSENT).all()
    loaded(cache, area, 22)
    loaded(cache, area, 23)
    assert (area.slot_of[:2] == ABSENT).all(), "as many were loaded as was said"


def test_at_most_a_third_of_the_cache_is_kept() -> None:
    cache, area = ChunkCache(6 * 16, 16), Area(100)
    loaded(cache, area, 0, keep=1000)
    loaded(cache, area, 1, 2, keep=1000)
    for chunk in range(3, 30):
        loaded(cache, area, chunk)
    assert area.slot_of[0] == ABSENT, "used before the others"
    assert (area.slot_of[1:3] != ABSENT).all()
    loaded(cache, area, *range(30, 36))
    assert (area.slot_of[30:36] != ABSENT).all(), "what is wanted now goes before what is kept"


def test_the_default_caches_have_room_for_the_default_windows() -> None:
    """Twice those that are open, and those that are open over the end of an epoch."""
    for cost in (LOCAL_COST, REMOTE_COST):
        slots = cost.cache_bytes // cost.slot_bytes
        assert slots >= 2 * cost.window + cost.window - 1 and slots // 3 >= cost.window - 1
