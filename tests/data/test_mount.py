"""Mounted: samples opened and read in pieces, batches of a sequence read ahead into buffers that are used again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hapi.data.dataset import find_dataset
from hapi.data.epoch_order import FULL, Shuffle, epoch_sequence
from hapi.data.manifest import SampleLayout
from hapi.data.mount import DatasetReader, mount
from hapi.data.mount import open_dataset as open_reader
from hapi.errors import DataError, NotFoundError, UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.base import Source
from hapi.store.open import open_store


class Texts(Source):
    """Samples of different lengths with known bytes."""

    def __init__(self, count: int) -> None:
        self.description = "texts"
        self.labels = np.arange(count, dtype=np.int64) % 3
        self.classes = ("a", "b", "c")
        self.layout = SampleLayout(kind="tensor", sample_shape=(1,), sample_dtype="uint8")

    def sample(self, number: int) -> bytes:
        return f"sample {number} ".encode() * (1 + number % 50)

    def content_key(self) -> bytes:
        return b"texts"


SOURCE = Texts(3_000)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("store"))
    pack(SOURCE, open_store(folder), "texts", PackOptions(shard_bytes=1 << 19))
    return f"{folder}/texts"


@pytest.fixture(params=[32 << 20, 40_000, 1])
def mounted(request: pytest.FixtureRequest, address: str) -> Iterator[DatasetReader]:
    before = threading.active_count()
    with mount(address, read_ahead_bytes=request.param) as found:
        yield found
    assert threading.active_count() <= before  # those of earlier tests may end meanwhile


def drain(mounted: DatasetReader, counts: list[int]) -> list[int]:
    """All ids that ``next_batch`` gives, ``counts`` samples at a time in turn; every sample is checked."""
    ids: list[int] = []
    for turn in range(10_000):
        batch = mounted.next_batch(counts[turn % len(counts)])
        if not len(batch):
            return ids
        for place, sample in enumerate(batch.ids.tolist()):
            assert batch.sample(place).tobytes() == SOURCE.sample(sample)
        assert batch.labels.tolist() == (batch.ids % 3).tolist() and batch.offsets[0] == 0
        ids += batch.ids.tolist()
    raise AssertionError("the sequence does not end")


@pytest.mark.parametrize("counts", [[256], [7], [3_000], [9_999], [1, 700, 64]])
def test_bread_gives_the_sequence(mounted: DatasetReader, counts: list[int]) -> None:
    order = mounted.sequence(seed=3, epoch=1)
    assert np.array_equal(order, epoch_sequence(3, 1, 3_000))
    assert drain(mounted, counts) == order.tolist()
    assert len(mounted.next_batch(5)) == 0


def test_any_order_from_any_place(mounted: DatasetReader) -> None:
    order = Shuffle(100, 3).sequence(1, 0, 3_000)
    mounted.sequence(1, 0, order)
    mounted.next_batch(64)
    mounted.sequence(1, 0, order, start=1_234)
    assert drain(mounted, [64]) == order[1_234:].tolist()
    mounted.sequence(0, 0, np.array([5, 5, 2_999], dtype=np.int64))
    assert drain(mounted, [2]) == [5, 5, 2_999]


def test_the_default_order_suits_the_store(mounted: DatasetReader) -> None:
    """Any permutation on a disk; chunk windows where the store is slow to read single samples."""
    assert mounted.sequence(1, 0).tolist() == FULL.sequence(1, 0, 3_000).tolist()
    url = f"memory://{uuid.uuid4().hex}"
    pack(SOURCE, open_store(url), "texts")
    with mount(f"{url}/texts") as far:
        windows = far.dataset.reader.default_shuffle
        assert far.sequence(1, 0).tolist() == windows.sequence(1, 0, 3_000).tolist()
        assert sorted(drain(far, [100])) == list(range(3_000))
        assert far.sequence(1, 0, shuffle="full").tolist() == FULL.sequence(1, 0, 3_000).tolist()
        order = np.array([5, 5, 2_999], dtype=np.int64)
        assert far.sequence(1, 0, order).tolist() == order.tolist()


def test_shuffles_by_name(mounted: DatasetReader) -> None:
    for shuffle in ("chunks:100:3", Shuffle(100, 3)):
        assert (
            mounted.sequence(1, 0, shuffle=shuffle).tolist() == Shuffle(100, 3).sequence(1, 0, 3_000).tolist()
        )
    default_shuffle = mounted.dataset.reader.default_shuffle.sequence(1, 2, 3_000)
    assert mounted.sequence(1, 2, shuffle="chunks").tolist() == default_shuffle.tolist()
    assert drain(mounted, [100]) == default_shuffle.tolist()
    with pytest.raises(UsageError, match="shuffle: expected 'auto', 'full' or"):
        mounted.sequence(1, 0, shuffle="chunk")
    with pytest.raises(UsageError, match="shuffle chunks:0: group and window are integers from 1"):
        mounted.sequence(1, 0, shuffle="chunks:0")
    with pytest.raises(UsageError, match="expected a Shuffle or its name, such as 'chunks', got 7"):
        mounted.sequence(1, 0, shuffle=7)  # type: ignore[arg-type]


def test_buffers_are_used_again(address: str) -> None:
    with mount(address, read_ahead_bytes=1 << 18) as mounted:
        mounted.sequence(0, 0)
        addresses = set()
        while len(batch := mounted.next_batch(100)):
            addresses.add(batch.data.base.ctypes.data if batch.data.base is not None else 0)
        assert len(addresses) <= 5


def test_open_read_close(mounted: DatasetReader) -> None:
    with mounted.open(49) as sample:
        assert sample.length == len(SOURCE.sample(49))
        assert sample.read(6) == b"sample" and sample.read(0) == b""
        assert sample.read() == SOURCE.sample(49)[6:] and sample.read(10) == b""
    with pytest.raises(UsageError, match="sample 49 is closed"):
        sample.read()
    with pytest.raises(NotFoundError, match="no sample 3000"):
        mounted.open(3_000)


def test_wrong_use_is_told(mounted: DatasetReader) -> None:
    with pytest.raises(NotFoundError, match="no sample -1"):
        mounted.sequence(0, 0, np.array([0, -1]))
    with pytest.raises(UsageError, match="start: expected 0 to 3000"):
        mounted.sequence(0, 0, start=3_001)
    with pytest.raises(UsageError, match="at least 1, got 0"):
        mounted.next_batch(0)
    expected = mounted.sequence(1, 2)
    for seed, epoch in ((-1, 0), (0, None), (1 << 63, 0), (0, 0.5), ("x", 0)):
        for order in (None, np.arange(2_000)):
            with pytest.raises(UsageError, match=r"(seed|epoch): expected an integer from 0 to 2\*\*63 - 1"):
                mounted.sequence(seed, epoch, order, shuffle="chunks:100:4")  # type: ignore[arg-type]
    assert (mounted.next_batch(100).ids == expected[:100]).all(), "it goes on as if nothing had been asked"
    assert (mounted.sequence(np.int64(1), np.uint32(2)) == expected).all()  # type: ignore[arg-type]


def test_damage_stops_where_it_is_and_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    pack(SOURCE, store, "texts")
    key = find_dataset(store, "texts").shard_key(0)
    data = bytearray(store.get(key))
    data[-1] ^= 1  # of the last sample
    store.put(key, data)
    with mount(f"{tmp_path}/texts", read_ahead_bytes=4_000) as mounted:
        mounted.sequence(0, 0, np.arange(3_000))
        for _ in range(29):
            assert len(mounted.next_batch(100)) == 100
        for _ in range(2):
            with pytest.raises(DataError, match=r"sample 2999 in shard shard-00000\.bin fails"):
                mounted.next_batch(100)
        assert mounted.next_batch(99).ids[-1] == 2_998


def test_a_sample_cache_gives_what_the_store_gave(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for had, asked in ((0, 3_000), (3_000, 0)):
        with mount(address, read_ahead_bytes=1 << 18, sample_cache=folder) as mounted:
            assert mounted.sample_cache is not None and mounted.sample_cache.samples == had
            with mock.patch.object(mounted.dataset, "read", wraps=mounted.dataset.read) as reads:
                for epoch in range(2):
                    order = mounted.sequence(seed=3, epoch=epoch)
                    assert drain(mounted, [64]) == order.tolist()
                with mounted.open(49) as sample:
                    assert sample.read() == SOURCE.sample(49)
            assert sum(len(call.args[0]) for call in reads.mock_calls) == asked


def test_a_sample_cache_smaller_than_the_data_set(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with mount(address, sample_cache=folder, sample_cache_bytes=200_000) as mounted:
        for epoch in range(2):
            order = mounted.sequence(seed=3, epoch=epoch)
            assert drain(mounted, [1, 700, 64]) == order.tolist()
        assert mounted.sample_cache is not None and 300 < mounted.sample_cache.samples < 700
    (folder / "hapi-cache").unlink()
    with pytest.raises(UsageError, match="has other files in it"):
        mount(address, sample_cache=folder)


def test_iteration_gives_the_batches_of_the_sequence(address: str) -> None:
    with open_reader(address, batch_size=700) as found:
        for start in (0, 2_000):
            wanted = found.sequence(1, 0, start=start)[start:]
            batches = [batch.ids.tolist() for batch in found]
            assert [len(ids) for ids in batches[:-1]] == [700] * (len(wanted) // 700)
            assert [sample for ids in batches for sample in ids] == wanted.tolist()
            assert list(found) == []


def test_iteration_needs_a_sequence_and_a_size(address: str) -> None:
    with open_reader(address) as found, pytest.raises(UsageError, match="call sequence"):
        next(iter(found))
    for wrong in (0, True):
        with pytest.raises(UsageError, match="batch_size"):
            open_reader(address, batch_size=wrong)


def test_names_of_dlfs_are_aliases() -> None:
    assert mount is open_reader
    assert DatasetReader.bread is DatasetReader.next_batch
