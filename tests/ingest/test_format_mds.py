"""MDS shards: where their images and labels lie, what their index says, and every kind of damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign_shards import Value, mds_config, mds_index, mds_shard

from hapi.errors import DataError, HapiError, UsageError
from hapi.ingest.formats import mds, shard
from hapi.ingest.formats.mds_index import MdsShard
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.store.base import ObjectInfo
from hapi.store.open import open_store

STORE = open_store("memory://format-mds")
COLUMNS = {"image": "jpeg", "label": "int", "name": "str"}
SAMPLES: list[dict[str, Value]] = [
    {"image": bytes([number]) * (number * 7 % 50 + 1), "label": number - 3, "name": f"n{number}"}
    for number in range(9)
]


def scan(data: bytes, fields: Fields | None = None, info: ObjectInfo | None = None) -> list[Found | Bad]:
    """What a shard of these bytes holds; every sample found lies in it."""
    STORE.put("a.mds", data)
    info = info or ObjectInfo("a.mds", len(data))
    shard_bytes = ShardBytes(STORE, info)
    found = list(mds.scan(shard_bytes, fields or Fields()))
    shard_bytes.checksum()
    for one in found:
        if isinstance(one, Found):
            assert one.offset >= 0 and one.length >= 0 and one.offset + one.length <= len(data)
    return found


def contents(data: bytes, fields: Fields | None = None) -> list[tuple[bytes, Any]]:
    """Image and label of every sample; none may be bad."""
    found = scan(data, fields)
    assert all(isinstance(one, Found) for one in found), found
    return [
        (data[one.offset : one.offset + one.length], one.label) for one in found if isinstance(one, Found)
    ]


def refusal(data: bytes, fields: Fields | None = None, info: ObjectInfo | None = None) -> str:
    with pytest.raises(DataError) as caught:
        scan(data, fields, info)
    assert "\n" not in str(caught.value) and "shard a.mds" in str(caught.value)
    return str(caught.value)


def bad(data: bytes) -> dict[str, str]:
    return {one.name: one.problem for one in scan(data) if isinstance(one, Bad)}


def with_config(**changes: Any) -> bytes:
    """The shard with other words about its columns."""
    return mds_shard(COLUMNS, SAMPLES, {**mds_config(COLUMNS), **changes})


def patched(data: bytes, entry: int, place: int) -> bytes:
    """The shard with entry ``entry`` of its table of places changed."""
    return data[: 4 + 4 * entry] + struct.pack("<I", place) + data[8 + 4 * entry :]


def test_images_and_labels_in_order() -> None:
    data = mds_shard(COLUMNS, SAMPLES)
    assert contents(data) == [(sample["image"], sample["label"]) for sample in SAMPLES]
    assert [one.name for one in scan(data)] == [str(number) for number in range(9)]


@pytest.mark.parametrize("encoding", ["int", "int8", "int16", "int32", "int64"])
def test_signed_labels(encoding: str) -> None:
    data = mds_shard({"x": "png", "y": encoding}, [{"x": b"i", "y": -5}, {"x": b"", "y": 100}])
    assert contents(data) == [(b"i", -5), (b"", 100)]


@pytest.mark.parametrize("encoding", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_labels(encoding: str) -> None:
    assert contents(mds_shard({"x": "png", "y": encoding}, [{"x": b"i", "y": 200}])) == [(b"i", 200)]


@pytest.mark.parametrize(
    ("text", "label"), [("cat", "cat"), (" 12\n", 12), ("n01 dog", "n01 dog"), ("-1", -1)]
)
def test_labels_as_text(text: str, label: int | str) -> None:
    for encoding in ("str", "str_int"):
        data = mds_shard(
            {"a": "str", "image": "bytes", "label": encoding}, [{"a": "", "image": b"i", "label": text}]
        )
        assert contents(data) == [(b"i", label)]


def test_columns_by_name() -> None:
    columns = {"depth": "png", "rgb": "png", "text": "str", "y": "int", "z": "int16"}
    data = mds_shard(columns, [{"depth": b"D", "rgb": b"RGB", "text": "caption", "y": 1, "z": 2}])
    assert contents(data, Fields("rgb", "z")) == [(b"RGB", 2)]
    assert contents(data, Fields("depth", "text")) == [(b"D", "caption")]
    assert "Give --image: 'depth' (png), 'rgb' (png)" in refusal(data)
    assert "no column 'x', only 'depth' (png)" in refusal(data, Fields("x"))
    assert "no column 'x'" in refusal(data, Fields("rgb", "x"))
    assert "holds 'str'; only encoded images" in refusal(data, Fields("text"))
    assert "holds 'png'; a label is one of" in refusal(data, Fields("rgb", "depth"))


def test_jpeg_is_preferred_to_bytes_and_no_label_is_none() -> None:
    data = mds_shard({"extra": "bytes", "picture": "jpeg"}, [{"extra": b"xx", "picture": b"pic"}])
    assert contents(data) == [(b"pic", None)]


@pytest.mark.parametrize(
    "encoding", ["pil", "ndarray", "ndarray:uint8:2,2", "list[jpeg]", "jpeg_array", "pkl"]
)
def test_what_is_no_encoded_image_is_refused(encoding: str) -> None:
    data = mds_shard({"image": encoding, "label": "int"}, [{"image": b"\0" * 20, "label": 1}])
    assert f"only 'image' ({encoding}), 'label' (int); pack them" in refusal(data)
    assert f"holds {encoding!r}; only encoded images" in refusal(data, Fields("image"))


def test_many_samples_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK_BYTES", 64)
    monkeypatch.setattr(mds, "_TABLE_ENTRIES", 3)
    test_images_and_labels_in_order()


def test_empty_shard() -> None:
    assert scan(mds_shard(COLUMNS, [])) == []


def test_cut_off_at_any_byte() -> None:
    data = mds_shard(COLUMNS, SAMPLES)
    for length in range(len(data)):
        assert "cut off" in refusal(data[:length])


def test_bytes_behind_the_end() -> None:
    assert "its last sample ends at byte" in refusal(mds_shard(COLUMNS, SAMPLES) + b"\0")


def test_wrong_count() -> None:
    data = mds_shard(COLUMNS, SAMPLES)
    for count in (0, 1, 8, 10, 1 << 20, (1 << 32) - 1):
        refusal(struct.pack("<I", count) + data[4:])


def test_wrong_places_are_bad_samples_and_others_are_found() -> None:
    data = mds_shard(COLUMNS, SAMPLES)
    first = int.from_bytes(data[4:8], "little")
    for place in (0, 3, first, len(data), len(data) + 1, (1 << 32) - 1):
        problems = bad(patched(data, 4, place))
        assert set(problems) == {"3", "4"}
    for place in (0, 40, first + 1, len(data) + 1):
        assert "damaged" in refusal(patched(data, 0, place))


def test_wrong_size_of_a_column() -> None:
    data = mds_shard(COLUMNS, SAMPLES)
    begin = int.from_bytes(data[4 + 4 * 2 : 8 + 4 * 2], "little")
    for size in (0, 1000, (1 << 32) - 1):
        problems = bad(data[:begin] + struct.pack("<I", size) + data[begin + 4 :])
        assert set(problems) == {"2"} and "its columns need" in problems["2"]


def test_labels_that_are_no_text_or_too_long() -> None:
    columns = {"image": "png", "label": "str"}
    problems = bad(
        mds_shard(columns, [{"image": b"i", "label": b"\xff"}, {"image": b"i", "label": b"x" * 5000}])
    )
    assert problems == {"0": "its label is no text", "1": "its label has 5000 bytes"}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "csv"}, {"version": 1}, {"column_names": ["a"]}, {"column_names": ["image", "image", "name"]},
        {"column_names": None}, {"column_names": [1, 2, 3]}, {"column_encodings": ["jpeg", None, "str"]},
        {"column_sizes": [None, 4, None]}, {"column_sizes": [None, True, None]}, {"column_sizes": [None, 1e3, None]},
        {"column_sizes": [-1, 8, None]}, {"column_sizes": [1 << 40, 8, None]},
    ],
)  # fmt: skip
def test_wrong_description_of_columns(changes: Mapping[str, Any]) -> None:
    assert "columns' description cannot be understood" in refusal(with_config(**changes))


@pytest.mark.parametrize("text", [b"[1, 2]", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"null", b"\0"])
def test_description_that_is_no_json(text: bytes) -> None:
    places = struct.pack("<III", 1, 12 + len(text), 12 + len(text) + 9)
    assert "cannot be understood" in refusal(places + text + b"x" * 9)


def test_huge_description() -> None:
    text = b" " * (2 << 20)
    places = struct.pack("<III", 1, 12 + len(text), 12 + len(text) + 9)
    assert "its columns are described" in refusal(places + text + b"x" * 9)


@given(st.data())
def test_random_damage_is_one_clear_error(data: st.DataObject) -> None:
    whole = bytearray(mds_shard(COLUMNS, SAMPLES))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        found = scan(bytes(whole))
    except DataError as error:
        assert "shard a.mds" in str(error) and "\n" not in str(error)
    else:
        assert [one.name for one in found] == [str(number) for number in range(9)]


# ---- index.json


def listed(folder: str = "set", **objects: bytes | None) -> list[ObjectInfo]:
    """The shards of ``folder`` when these objects are all that the store has."""
    store = open_store("memory://format-mds-index")
    for info in store.list():
        store.delete(info.key)
    for name, data in objects.items():
        if data is not None:
            store.put(name.replace("__", "/").replace("_", "."), data)
    return mds.shards_of(store, folder, store.list(folder))


ONE, TWO = mds_shard(COLUMNS, SAMPLES[:5]), mds_shard(COLUMNS, SAMPLES[5:])


def index_of(hashes: tuple[str, ...] = (), **names: bytes) -> bytes:
    return mds_index(COLUMNS, {name.replace("_", "."): data for name, data in names.items()}, hashes)


def changed(index: bytes, number: int, **changes: Any) -> bytes:
    """The index with other values for one shard; those of the field ``raw`` within its ``raw_data``."""
    document = json.loads(index)
    document["shards"][number]["raw_data"].update(changes.pop("raw", {}))
    document["shards"][number].update(changes)
    return json.dumps(document).encode()


def test_shards_in_the_order_of_the_index() -> None:
    found = listed(
        set__index_json=index_of(b_mds=TWO, a_mds=ONE), set__a_mds=ONE, set__b_mds=TWO, set__left_mds=ONE
    )
    assert [(info.key, info.size) for info in found] == [("set/b.mds", len(TWO)), ("set/a.mds", len(ONE))]
    assert [info.samples for info in found if isinstance(info, MdsShard)] == [4, 5]


def test_merged_index_has_shards_in_folders() -> None:
    merged = mds_index(COLUMNS, {"0/a.mds": ONE, "1/a.mds": TWO})
    part = mds_index(COLUMNS, {"a.mds": ONE})
    found = listed(set__index_json=merged, set__0__a_mds=ONE, set__1__a_mds=TWO, set__0__index_json=part)
    assert [info.key for info in found] == ["set/0/a.mds", "set/1/a.mds"]


def test_folders_with_an_index_each_are_named() -> None:
    index = index_of(a_mds=ONE)
    parts = {"train__index_json": index, "train__a_mds": ONE, "val__index_json": index, "val__a_mds": ONE}
    with pytest.raises(UsageError, match=r"its folders train, val have: index each of them, as in set/train"):
        listed(**{f"set__{name}": data for name, data in parts.items()})
    with pytest.raises(UsageError, match=r"as in train, or merge"):
        listed("", **parts)
    with pytest.raises(UsageError, match=r"set has MDS shards but no index.json"):
        listed(set__a_mds=ONE)


def test_compressed_shards_are_refused_unless_they_are_there_raw_too() -> None:
    zipped = {"basename": "a.mds.zstd", "bytes": 5, "hashes": {}}
    index = changed(index_of(a_mds=ONE), 0, compression="zstd:3", zip_data=zipped)
    with pytest.raises(UsageError, match=r"shard 0 is compressed \(zstd:3\).*decompress the shards, or pack"):
        listed(set__index_json=index, set__a_mds_zstd=b"12345")
    assert len(listed(set__index_json=index, set__a_mds=ONE, set__a_mds_zstd=b"12345")) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"raw": {"basename": "c.mds"}}, "'set/c.mds' is not there"),
        ({"raw": {"basename": "../a.mds"}}, "refused"),
        ({"raw": {"basename": "/a.mds"}}, "refused"),
        ({"raw": {"basename": 7}}, "its file's name is '7'"),
        ({"raw": {"basename": "a.mds", "bytes": len(ONE)}}, "twice"),
        ({"raw": {"bytes": 3}}, "bytes, not 3: it is cut off"),
        ({"raw": {"hashes": ["sha1"]}}, "no table"),
        ({"raw": {"hashes": {"sha1": 5}}}, "no table"),
        ({"raw_data": None}, "no field 'raw_data'"),
        ({"format": "jsonl"}, "format 'jsonl'"),
        ({"version": 3}, "of version '3'"),
        ({"samples": True}, "number of samples"),
        ({"samples": -1}, "number of samples"),
        ({"samples": None}, "number of samples"),
    ],
)
def test_wrong_entries(changes: Mapping[str, Any], told: str) -> None:
    index = changed(index_of(a_mds=ONE, b_mds=TWO), 1, **changes)
    with pytest.raises(DataError) as caught:
        listed(set__index_json=index, set__a_mds=ONE, set__b_mds=TWO)
    assert told in str(caught.value) and "set/index.json" in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 3, "shards": []}', b"[" * 100_000]
)
def test_index_that_is_none(text: bytes) -> None:
    with pytest.raises(DataError, match=r"set/index\.json"):
        listed(set__index_json=text, set__a_mds=ONE)


@given(st.data())
def test_random_damage_of_the_index(data: st.DataObject) -> None:
    whole = bytearray(index_of(("sha1",), a_mds=ONE, b_mds=TWO))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    try:
        found = listed(set__index_json=bytes(whole), set__a_mds=ONE, set__b_mds=TWO)
    except HapiError as error:
        assert "\n" not in str(error)
    else:
        assert {info.key for info in found} <= {"set/a.mds", "set/b.mds"}


def test_digests_and_count_are_checked() -> None:
    kinds = ("md5", "sha1", "sha256", "xxh64", "xxh128", "xxh3_64")
    (info,) = listed(set__index_json=index_of(kinds, a_mds=ONE), set__a_mds=ONE)
    assert isinstance(info, MdsShard) and len(info.digests) == 6
    here = MdsShard("a.mds", info.size, info.samples, info.digests)
    assert len(scan(ONE, info=here)) == 5
    damaged = ONE.replace(b"\2" * 15, b"\3" * 15)
    assert len(damaged) == len(ONE) and damaged != ONE and len(scan(damaged)) == 5
    assert "its md5 is" in refusal(damaged, info=here)
    assert "index.json says 6" in refusal(ONE, info=MdsShard("a.mds", info.size, 6, ()))


def test_digests_of_other_kinds_are_passed_over() -> None:
    (info,) = listed(
        set__index_json=changed(index_of(a_mds=ONE), 0, raw={"hashes": {"shake_128": "00", "crc9": "1"}}),
        set__a_mds=ONE,
    )
    assert isinstance(info, MdsShard) and info.digests == ()


@pytest.mark.parametrize(
    ("base", "claimed"),
    [("shard.00000.mds", True), ("shard.00000.mds.zstd", True), ("index.json", False), ("mds", False),
     ("a.tar", False)],
)  # fmt: skip
def test_claims(base: str, claimed: bool) -> None:
    assert mds.claims(base) is claimed
