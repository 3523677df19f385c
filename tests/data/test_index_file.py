"""Indexes and arrays as copies of one's own: files that are shortened under their readers end nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.disks import small_disk

from hapi.data import index_file
from hapi.data.dataset import find_dataset
from hapi.data.index_file import read_own
from hapi.errors import DataError, StoreError, UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import SourceOptions, open_source
from hapi.store.local import LocalStore
from hapi.store.safetensors import encode_tensors
from hapi.store.stored_array import StoredArray, npy_array, safetensors_arrays


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    pack(open_source("sklearn:digits"), store, "d", PackOptions(limit=100, shard_bytes=4000))
    return store


@pytest.mark.parametrize("in_memory", [1 << 30, 100])
def test_an_open_index_outlives_its_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    """Also one beyond what is kept in memory: its file has no name, and nobody else can shorten it."""
    monkeypatch.setattr(index_file, "IN_MEMORY_BYTES", in_memory)
    monkeypatch.setattr(index_file, "_BLOCK", 1000)
    before = set(Path(tempfile.gettempdir()).iterdir())
    dataset = find_dataset(store, "d")
    places, labels = dataset.locate(np.arange(100)), dataset.labels(np.arange(100))
    os.truncate(store.root / dataset.manifest.index_key, 10)
    assert np.array_equal(dataset.locate(np.arange(100)).offset, places.offset)
    assert np.array_equal(dataset.labels(np.arange(100)), labels)
    assert len(dataset.read([0, 99])) == 2
    left = set(Path(tempfile.gettempdir()).iterdir()) - before
    assert not [path for path in left if path.name.startswith("hapi-index-")]
    with pytest.raises(DataError, match="10 bytes instead of"):
        find_dataset(store, "d")


def test_no_room_for_a_large_index(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(index_file, "IN_MEMORY_BYTES", 100)
    store.put("large", bytes(100_000))
    with small_disk(tmp_path / "small", 64) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(StoreError, match=r"has no room for them: .*; set TMPDIR"):
            read_own(store, "large", 100_000)
        assert not list(disk.iterdir())
    assert read_own(store, "large", 1000).tolist() == [0] * 1000


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_an_array_that_is_shortened_while_it_is_packed(tmp_path: Path, suffix: str) -> None:
    values = np.arange(4000, dtype=np.uint8).reshape(1000, 4)
    path, labels = tmp_path / f"x.{suffix}", tmp_path / "labels.txt"
    labels.write_text("0 1\n" * 500)
    if suffix == "npy":
        np.save(path, values)
    else:
        path.write_bytes(encode_tensors({"x": values, "y": np.arange(1000) % 2}))
    source = open_source(str(path), SourceOptions(labels=labels))
    assert bytes(source.sample(999)) == values[999].tobytes()
    os.truncate(path, path.stat().st_size - 40)
    assert bytes(source.sample(0)) == values[0].tobytes()
    with pytest.raises(DataError, match="shortened while it was read"):
        source.sample(999)
    store = LocalStore(tmp_path / "store")
    with pytest.raises(DataError, match="shortened"):
        pack(source, store, "d")


def test_arrays_of_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array in (
        np.arange(24.0).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24).reshape(4, 6)),
        np.arange(5, dtype=">i4"),
        np.zeros((3, 0), dtype=np.float32),
        np.float32(7),
    ):
        np.save(path, array)
        try:
            found = npy_array(path)
        except ValueError:
            assert np.size(array) == 0  # numpy maps no empty files
            continue
        assert found.shape == np.shape(array) and found.dtype == np.asarray(array).dtype
        whole = found.whole() if isinstance(found, StoredArray) else found
        assert np.array_equal(whole, array)
        if found.ndim:
            assert len(found) == len(array) and np.array_equal(found[len(array) - 1], array[-1])
    other = tmp_path / "x.safetensors"
    other.write_bytes(encode_tensors({"a": np.arange(6).reshape(2, 3), "b": np.ones(3, dtype=np.float16)}))
    arrays = safetensors_arrays(other)
    assert arrays["a"][1].tolist() == [3, 4, 5] and arrays["b"].whole().tolist() == [1, 1, 1]
    for damage in (
        b"",
        b"1234567",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ):
        other.write_bytes(damage)
        with pytest.raises(UsageError, match="cannot be read"):
            open_source(str(other))
