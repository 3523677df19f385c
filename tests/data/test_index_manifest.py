"""Index, manifest and layout: round trips, and every damage is one clear error."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hapi.data.index import FIELDS, SampleIndex
from hapi.data.manifest import InPlace, Manifest, SampleLayout
from hapi.data.sample_directory import SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.errors import BadRequestError, DataError
from hapi.store.safetensors import decode_tensors, encode_tensors
from hapi.wire.references import TransformSpec
from hapi.wire.samples import offsets_of


def make_index(lengths: list[int]) -> SampleIndex:
    """An index of one shard with samples of these lengths."""
    count = len(lengths)
    directory = SampleDirectory.empty(count)
    directory.write(0, 0, offsets_of(np.array(lengths))[:-1], lengths)
    return SampleIndex(
        directory=directory,
        label=np.arange(count, dtype=np.int64) % 3,
        checksum=np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        shards=ShardTable.of([Shard(key="shard", size=sum(lengths), checksum=5, count=count)]),
    )


TABLE = ShardTable.of(
    [Shard(key="a", size=9, checksum=1, count=2), Shard(key="b/ü", size=4, checksum=2, count=1)]
)

_lengths = st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=40)


@given(_lengths)
def test_index_round_trip_also_through_the_library(lengths: list[int]) -> None:
    index = make_index(lengths)
    data = index.to_bytes({"k": "v"})
    again, metadata = SampleIndex.from_buffer(np.frombuffer(data, dtype=np.uint8), "index")
    assert metadata == {"k": "v"} and again.digest() == index.digest()
    library = safetensors.numpy.load(bytes(data))
    assert set(library) == {*FIELDS, "run"}
    for name, array in again.arrays().items():
        assert np.array_equal(array, index.arrays()[name]) and np.array_equal(library[name], array)


@given(_lengths, st.data())
def test_the_digest_is_of_every_bit(lengths: list[int], data: st.DataObject) -> None:
    index = make_index(lengths)
    before = index.digest()
    array = index.arrays()[data.draw(st.sampled_from([f for f in FIELDS if f != "run"]))].reshape(-1)
    bit = data.draw(st.integers(0, 8 * array.itemsize - 2))
    array[data.draw(st.integers(0, len(array) - 1))] ^= array.dtype.type(1 << bit)
    assert index.digest() != before


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"shard": np.zeros(3, np.uint32), "label": np.zeros(3, np.int64)},
            "found label, shard: no index, or",
        ),
        ({"place": np.zeros((3, 2), np.uint64), "label": np.zeros(2, np.int64)}, "array 'place'"),
        ({"place": np.zeros((3, 3), np.uint64), "label": np.zeros(3, np.int64)}, "array 'place'"),
        ({"place": np.zeros(3, np.uint64), "label": np.zeros(3, np.int64)}, "array 'place'"),
        ({"place": np.zeros((3, 2), np.int64), "label": np.zeros(3, np.int64)}, "array 'place'"),
        ({"place": np.zeros((3, 2), np.uint64), "label": np.int64(3).reshape(())}, "array 'label'"),
        ({"place": np.zeros((3, 2), np.uint64), "label": np.zeros((3, 2), np.int64)}, "array 'label'"),
        ({"place": np.zeros((3, 2), np.uint64), "label": np.zeros(3, np.float32)}, "array 'label'"),
        ({"place": np.zeros((3, 2), np.uint64), "label": np.zeros((2, 4), np.float32)}, "array 'place'"),
        (
            {"place": np.zeros((3, 2), np.uint64), "label": np.zeros(3, np.int64), "run": np.zeros(1)},
            "array 'run'",
        ),
    ],
)
def test_an_index_of_another_form(tensors: dict[str, np.ndarray], message: str) -> None:
    if "place" in tensors:
        no_runs = {"run": np.zeros(0, np.uint64)}
        tensors = {"checksum": np.zeros(3, np.uint64), **no_runs, **TABLE.arrays(), **tensors}
    with pytest.raises(DataError, match=f"^here: .*{message}.*; pack or index the dataset again"):
        SampleIndex.from_buffer(np.frombuffer(encode_tensors(tensors), dtype=np.uint8), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"shard": np.zeros((2, 2), np.uint64)},
        {"shard": np.zeros((0, 3), np.uint64), "shard_end": np.zeros(0, np.uint64)},
        {"shard": np.array([[9, 1, 2], [4, 2, 0]], np.uint64)},
        {"shard": np.array([[9, 1, 2], [1 << 49, 2, 1]], np.uint64)},
        {"shard_end": np.array([1, 3], np.uint64)},
        {"shard_end": np.array([4, 4], np.uint64)},
        {"shard_end": np.array([5, 4], np.uint64)},
        {"shard_end": np.array([0, 5], np.uint64)},
        {"shard_end": np.array([4, 5], np.uint64)},
        {"shard_name": np.frombuffer(b"a\xffbcd", np.uint8)},
        {"shard_name": np.zeros(5, np.int8)},
    ],
)
def test_a_damaged_table_of_shards(change: dict[str, np.ndarray]) -> None:
    with pytest.raises(DataError, match=r"^here: .*; do it again$"):
        ShardTable.from_arrays({**TABLE.arrays(), **change}, "here", "do it again")


def test_tables_of_shards_one_after_the_other() -> None:
    both = ShardTable.joined([TABLE, ShardTable.of([Shard(key="c", size=7, checksum=3, count=5)]), TABLE])
    again = ShardTable.from_arrays(both.arrays(), "here", "")
    assert [again.key(n) for n in range(len(again))] == ["a", "b/ü", "c", "a", "b/ü"]
    assert again[2] == Shard(key="c", size=7, checksum=3, count=5) and again.total_bytes == 33
    assert again.firsts.tolist() == [0, 2, 3, 8, 10, 11]


def test_files_of_the_library_are_read() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.int64([[4]]),
    }
    found, _ = decode_tensors(np.frombuffer(safetensors.numpy.save(tensors), dtype=np.uint8), "file")
    assert all(np.array_equal(found[k], v) and found[k].dtype == v.dtype for k, v in tensors.items())


def test_damaged_tensor_files_raise_only_data_errors() -> None:
    """Cut at every byte, and with other values in each."""
    data = bytes(encode_tensors({"a": np.arange(10, dtype=np.uint32), "b": np.ones(3)}, {"m": "x"}))
    refused = 0
    for position, value in itertools.product(range(len(data)), (None, 0, 1, 0x22, 0x39, 0x7D, 0xFF)):
        rest = b"" if value is None else bytes([value]) + data[position + 1 :]
        try:
            decode_tensors(np.frombuffer(data[:position] + rest, dtype=np.uint8), "file")
        except DataError as error:
            refused += 1
            assert "file" in str(error)
    assert refused > len(data)


def test_an_index_with_several_values_a_label() -> None:
    index = replace(make_index([5, 6]), label=np.array([[0, 1, 1], [0.5, 0, 1]], np.float32))
    again, _ = SampleIndex.from_buffer(np.frombuffer(index.to_bytes(), dtype=np.uint8), "index")
    assert again.label.dtype == np.float32 and again.label.tolist() == index.label.tolist()
    assert SampleIndex.joined([again, again]).label.shape == (4, 3)


def make_manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "name": "d",
        "pack": "p1",
        "count": 3,
        "classes": ("x", "y", "z"),
        "layout": SampleLayout(kind="encoded"),
        "transform": TransformSpec(),
        "index_size": 100,
        "index_xxh3": "0" * 16,
        "shards": 2,
        "total_bytes": 10,
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
        make_manifest(in_place=InPlace(format="webdataset", folder="a/b"), skipped=3),
        make_manifest(in_place=InPlace(format="webdataset", folder="")),
        make_manifest(label_kind="multi"),
        make_manifest(label_kind="regression"),
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
        {"shards": 3},
        {"total_bytes": 11},
        {"label_kind": "multi"},
        {"label_kind": "regression"},
    ):
        assert make_manifest(**change).version != base.version


def _wrong_manifests() -> list[bytes]:
    good = json.loads(make_manifest().to_bytes())
    wrong: list[object] = [None, [], 1, {}, {**good, "extra": 1}]
    wrong += [{**good, "label_kind": kind} for kind in ("multi", "other", None, 1)]  # no such version or kind
    for key in good:
        wrong.append({k: v for k, v in good.items() if k != key})
        if key not in ("source", "created", "pack"):
            wrong += [{**good, key: value} for value in ("../x", -1, 1.5, True, [], {}, "\0")]
    for key, value in (("folder", "../x"), ("folder", 1), ("format", "a/b"), ("more", 1)):
        wrong.append({**good, "in_place": {"format": "webdataset", "folder": "a/b", key: value}})
    twice = json.dumps(good).encode().replace(b'"count":', b'"count": 1, "count":')
    return [json.dumps(w).encode() for w in wrong] + [twice, b"", b"{", b"\xff", b"[" * 100_000]


def test_every_wrong_field_of_a_manifest_is_a_data_error() -> None:
    for data in _wrong_manifests():
        with pytest.raises(DataError, match="here"):
            Manifest.from_bytes(data, "d", "here")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (2, "here: format 2 is of an older Hapi, this one reads 3; pack the dataset again"),
        (1, "here: format 1 is of an older Hapi, this one reads 3; pack the dataset again"),
        (4, "here: format 4 is of a newer Hapi, this one reads 3; update Hapi"),
        (None, "here: manifest.format: expected an integer"),
        (True, "here: manifest.format: expected an integer"),
    ],
)
def test_another_version_has_one_clear_error(found: object, message: str) -> None:
    document = {**json.loads(make_manifest().to_bytes()), "format": found, "field": "of that version"}
    with pytest.raises(DataError) as raised:
        Manifest.from_bytes(json.dumps(document).encode(), "d", "here")
    assert str(raised.value).startswith(message)


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
