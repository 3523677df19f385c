"""Checksums of runs: a chunk is checked by them, the samples' own decide where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.arrays import IntArray
from hapi.data.chunk_checksums import RUN_BYTES, Runs, run_samples, run_sums, runs_of
from hapi.data.dataset import Dataset
from hapi.data.index import SampleIndex, digest
from hapi.data.index_file import read_index
from hapi.data.manifest import MAX_SAMPLES, SampleLayout, load_manifest, manifest_key
from hapi.data.reading.reader import AccessHint
from hapi.data.shards import MAX_SHARD_SIZE
from hapi.errors import DataError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.base import Source
from hapi.store.local import LocalStore
from hapi.wire.samples import offsets_of


class Noise(Source):
    def __init__(self, lengths: Sequence[int]) -> None:
        self.description = "noise"
        generator = np.random.default_rng(4)
        self.samples = [generator.bytes(length) for length in lengths]
        self.labels = np.zeros(len(lengths), dtype=np.int64)
        self.classes = ("a",)
        self.layout = SampleLayout(kind="tensor", sample_shape=(1,), sample_dtype="uint8")

    def sample(self, number: int) -> bytes:
        return self.samples[number]

    def content_key(self) -> bytes:
        return b"".join(self.samples)


class Checked(Dataset):
    """Counts the samples that are checked one by one."""

    def __init__(self, store: LocalStore, name: str = "d", runs: bool = True) -> None:
        manifest = load_manifest(store, name)
        index = read_index(store, manifest)
        super().__init__(store, manifest, index if runs else replace(index, run=index.run[:0]))
        self.alone = 0
        check = self.reader._check

        def counted(ids: IntArray, *rest: object) -> None:
            self.alone += len(ids)
            check(ids, *rest)  # type: ignore[arg-type]

        self.reader._check = counted

    def all_bytes(self) -> bytes:
        """Every sample, read in chunks, one after the other."""
        hint = AccessHint(self.reader.default_shuffle.group)
        return self.read(np.arange(len(self.index)), hint=hint).data.tobytes()


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Noise, LocalStore]:
    source = Noise(np.random.default_rng(2).integers(1, 1000, 3000).tolist())
    store = LocalStore(tmp_path / "store")
    pack(source, store, "d", PackOptions(shard_bytes=600_000))
    return source, store


@pytest.mark.parametrize("runs", [True, False])
def test_samples_of_sound_chunks_are_not_checked_one_by_one(
    packed: tuple[Noise, LocalStore], runs: bool
) -> None:
    source, store = packed
    dataset = Checked(store, runs=runs)
    assert dataset.all_bytes() == b"".join(source.samples)
    # Chunks begin where groups do, runs where shards do: those at the edges of a chunk lie in it partly.
    assert dataset.alone < 1000 if runs else dataset.alone == 3000


def test_runs_that_fit_the_chunks_leave_nothing_to_check(tmp_path: Path) -> None:
    source, store = Noise([512] * 3000), LocalStore(tmp_path)
    pack(source, store, "d", PackOptions(shard_bytes=1 << 20))
    dataset = Checked(store)
    assert dataset.all_bytes() == b"".join(source.samples)
    assert dataset.alone == 0


def test_a_damaged_sample_is_named_and_costs_its_chunk_only(packed: tuple[Noise, LocalStore]) -> None:
    source, store = packed
    dataset = Checked(store)
    place = dataset.locate(np.array([1234]))
    key = dataset.shard_key(int(place.shard[0]))
    data = bytearray(store.get(key))
    data[int(place.offset[0])] ^= 1
    store.put(key, data)
    others = np.delete(np.arange(3000), 1234)
    read = dataset.read(others, hint=AccessHint(dataset.reader.default_shuffle.group))
    assert read.data.tobytes() == b"".join(source.samples[i] for i in others)
    assert 0 < dataset.alone < 2 * 600_000 / 400
    with pytest.raises(DataError, match=f"sample 1234 in shard {key.rpartition('/')[2]} "):
        dataset.read(np.array([1234]), hint=AccessHint(dataset.reader.default_shuffle.group))


def test_wrong_sums_of_sound_samples_cost_time_only(packed: tuple[Noise, LocalStore]) -> None:
    source, store = packed
    rewrite(store, lambda index: replace(index, run=index.run ^ np.uint64(1)))
    dataset = Checked(store)
    assert dataset.all_bytes() == b"".join(source.samples)
    assert dataset.alone == 3000


def test_sums_of_another_number_are_refused(packed: tuple[Noise, LocalStore]) -> None:
    _, store = packed
    manifest = load_manifest(store, "d")
    index = read_index(store, manifest)
    runs = len(index.run)
    assert runs == int(runs_of(index.shards.size, index.shards.count).sum()) > 10
    rewrite(store, lambda index: replace(index, run=index.run[1:]))
    with pytest.raises(DataError, match=f"checksums of {runs - 1} runs, the shards have {runs}; pack"):
        read_index(store, load_manifest(store, "d"))


def rewrite(store: LocalStore, change: object) -> None:
    manifest = load_manifest(store, "d")
    index: SampleIndex = change(read_index(store, manifest))  # type: ignore[operator]
    encoded = index.to_bytes()
    store.put(manifest.index_key, encoded)
    manifest = replace(manifest, index_size=len(encoded), index_xxh3=digest(encoded))
    store.put(manifest_key("d"), manifest.to_bytes())


def test_large_samples_have_no_runs() -> None:
    assert run_samples(100 * 40_000, 100) == 1 and runs_of(100 * 40_000, 100) == 0
    assert len(run_sums(bytes(80_000), offsets_of(np.array([40_000, 40_000])))) == 0
    assert run_samples([1000 * 512, 3 * 512], [1000, 3]).tolist() == [RUN_BYTES // 512, 3]


@given(st.integers(0, MAX_SHARD_SIZE), st.integers(1, MAX_SAMPLES))
def test_any_shard_has_a_run_that_can_be(size: int, count: int) -> None:
    run = int(run_samples(size, count))
    assert 1 <= run <= count and (run == 1 or (run - 1) * (size / count) <= RUN_BYTES)
    assert int(runs_of(size, count)) == (0 if run == 1 else -(-count // run))


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=200), st.data())
def test_every_flipped_byte_is_noticed(lengths: list[int], data: st.DataObject) -> None:
    offsets = offsets_of(np.array(lengths))
    buffer = np.frombuffer(np.random.default_rng(0).bytes(int(offsets[-1])), np.uint8).copy()
    sums = run_sums(buffer, offsets)
    runs = Runs(np.array([len(buffer)]), np.array([len(lengths)]), sums)
    edges = np.append(offsets[: -1 : int(runs.samples[0])], offsets[-1])
    assert runs.fit(0, 0, buffer.data, edges[:-1].tolist(), edges[1:].tolist())
    buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= 1
    assert not runs.fit(0, 0, buffer.data, edges[:-1].tolist(), edges[1:].tolist())
