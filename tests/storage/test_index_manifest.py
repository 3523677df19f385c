"""Index, manifest and layout: round trips, and every damage is one clear error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.errors import BadRequestError, DataError
from hapi.storage.dataset import open_dataset
from hapi.storage.index import FIELDS, SampleIndex, digest
from hapi.storage.manifest import Manifest, SampleLayout, Shard, manifest_key
from hapi.storage.objects import open_store
from hapi.storage.tensorfile import decode_tensors, encode_tensors
from hapi.wire.references import TransformSpec


def make_index(shards: list[list[int]]) -> SampleIndex:
    """An index of shards with these sample lengths."""
    index = SampleIndex.empty(sum(len(s) for s in shards))
    first = 0
    for number, lengths in enumerate(shards):
        index.place(first, np.array(lengths, dtype=np.uint32), number)
        first += len(lengths)
    index.label[:] = np.arange(len(index)) % 3
    index.checksum[:] = np.arange(len(index), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return index


_shards = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), min_size=1, max_size=5)


@given(_shards)
def test_index_round_trip_also_through_the_library(shards: list[list[int]]) -> None:
    index = make_index(shards)
    data = index.to_bytes({"k": "v"})
    again, metadata = SampleIndex.from_buffer(np.frombuffer(data, dtype=np.uint8), "index")
    assert metadata == {"k": "v"}
    library = safetensors.numpy.load(bytes(data))
    for name in FIELDS:
        assert np.array_equal(getattr(again, name), getattr(index, name))
        assert np.array_equal(library[name], getattr(index, name))
    again.check_layout([sum(s) for s in shards], [len(s) for s in shards], "index")
    flat = [(n, sum(s[:i]), length) for n, s in enumerate(shards) for i, length in enumerate(s)]
    assert list(zip(again.shard.tolist(), again.offset.tolist(), again.length.tolist(), strict=True)) == flat


@given(_shards, st.data())
def test_any_wrong_place_in_an_index_is_found(shards: list[list[int]], data: st.DataObject) -> None:
    index = make_index(shards)
    name = data.draw(st.sampled_from(["shard", "offset", "length"]))
    array = getattr(index, name)
    position = data.draw(st.integers(0, len(index) - 1))
    array[position] ^= array.dtype.type(1 << data.draw(st.integers(0, 31)))
    with pytest.raises(DataError, match="shard"):
        index.check_layout([sum(s) for s in shards], [len(s) for s in shards], "index")


def test_files_of_the_library_are_read() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.int64([[4]]),
    }
    found, _ = decode_tensors(np.frombuffer(safetensors.numpy.save(tensors), dtype=np.uint8), "file")
    assert all(np.array_equal(found[k], v) and found[k].dtype == v.dtype for k, v in tensors.items())


@settings(max_examples=200)
@given(st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_damaged_tensor_files_raise_only_data_errors(position: int, value: int, cut: bool) -> None:
    data = bytearray(encode_tensors({"a": np.arange(10, dtype=np.uint32), "b": np.ones(3)}, {"m": "x"}))
    position %= len(data)
    damaged = data[:position] if cut else data[:position] + bytes([value]) + data[position + 1 :]
    try:
        decode_tensors(np.frombuffer(bytes(damaged), dtype=np.uint8), "file")
    except DataError as error:
        assert "file" in str(error)


def make_manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "name": "d",
        "pack": "p1",
        "count": 3,
        "classes": ("x", "y", "z"),
        "layout": SampleLayout(kind="encoded"),
        "transform": TransformSpec(),
        "index_xxh3": "0" * 16,
        "shards": (Shard(key="shard-00000.bin", size=10, xxh3="1" * 16, count=3),),
        "source": "test",
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def test_manifest_round_trip() -> None:
    for manifest in (
        make_manifest(),
        make_manifest(
            layout=SampleLayout(kind="tensor", sample_shape=(3, 8, 8), sample_dtype="uint8"), transform=None
        ),
    ):
        assert Manifest.from_bytes(manifest.to_bytes(), "d", "here") == manifest


def test_version_is_of_the_content_only() -> None:
    base = make_manifest()
    same = make_manifest(name="other", pack="p2", created="later", source="elsewhere")
    assert same.version == base.version
    for change in (
        {"classes": ("x", "y", "w")},
        {"transform": TransformSpec.for_image_size(64)},
        {"transform": None},
        {"index_xxh3": "2" * 16},
        {"shards": (Shard(key="shard-00000.bin", size=10, xxh3="3" * 16, count=3),)},
    ):
        assert make_manifest(**change).version != base.version


def _wrong_manifests() -> list[bytes]:
    good = json.loads(make_manifest().to_bytes())
    wrong: list[object] = [None, [], 1, {}, {**good, "extra": 1}]
    for key in good:
        wrong.append({k: v for k, v in good.items() if k != key})
        if key not in ("source", "created", "pack"):
            wrong += [{**good, key: value} for value in ("../x", -1, 1.5, True, [], {}, "\0")]
    for key in good["shards"][0]:
        wrong.append({**good, "shards": [{**good["shards"][0], key: "../../x"}]})
    return [json.dumps(w).encode() for w in wrong] + [b"", b"{", b"\xff", b"[" * 100_000]


def test_every_wrong_field_of_a_manifest_is_a_data_error() -> None:
    for data in _wrong_manifests():
        with pytest.raises(DataError, match="here"):
            Manifest.from_bytes(data, "d", "here")


def test_layout_json_is_strict() -> None:
    good = {"kind": "tensor", "sample_shape": [3, 2, 2], "sample_dtype": "float32"}
    assert SampleLayout.from_json(good).to_json() == good
    encoded = {"kind": "encoded", "sample_shape": None, "sample_dtype": None}
    assert SampleLayout.from_json(encoded).to_json() == encoded
    for wrong in (
        {**good, "kind": "other"},
        {**good, "sample_dtype": "object"},
        {**good, "sample_shape": [0]},
        {**good, "sample_shape": []},
        {**good, "sample_shape": [2**40]},
        {**encoded, "sample_shape": [1]},
        {"kind": "encoded"},
        [],
    ):
        with pytest.raises(BadRequestError):
            SampleLayout.from_json(wrong)


@pytest.mark.slow
def test_ten_million_samples_open_soon_and_small(tmp_path: Path) -> None:
    """Opened with no Python object per sample: in seconds, and reading a batch's places takes no time."""
    count, shards = 10_000_000, 100
    per_shard = count // shards
    index = SampleIndex.empty(count)
    lengths = np.full(per_shard, 1000, dtype=np.uint32)
    for number in range(shards):
        index.place(number * per_shard, lengths, number)
    index.label[:] = np.arange(count) % 3
    index.checksum[:] = 0
    encoded = index.to_bytes()
    entries = tuple(
        Shard(key=f"shard-{n:05d}.bin", size=per_shard * 1000, xxh3="0" * 16, count=per_shard)
        for n in range(shards)
    )
    manifest = make_manifest(count=count, shards=entries, index_xxh3=digest(encoded))
    store = open_store(str(tmp_path))
    store.put(manifest.index_key, encoded)
    store.put(manifest_key("d"), manifest.to_bytes())
    del index, encoded
    began = time.monotonic()
    dataset = open_dataset(store, "d")
    opened = time.monotonic() - began
    ids = np.arange(0, count, 9973)
    began = time.monotonic()
    assert np.array_equal(dataset.labels(ids), ids % 3) and dataset.lengths(ids).sum() == 1000 * len(ids)
    assert dataset.count == count and opened < 10 and time.monotonic() - began < 1
