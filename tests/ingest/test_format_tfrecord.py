"""TFRecord files of tf.train.Example: where their images and labels lie, and every kind of damage."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign_shards import example, feature, field, masked_crc32c, tfrecord, varint

from hapi.errors import DataError, UsageError
from hapi.ingest.formats import protobuf as messages
from hapi.ingest.formats import shard
from hapi.ingest.formats import tfrecord as module
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.store.base import ObjectInfo
from hapi.store.open import open_store

pytest.importorskip("google_crc32c")
STORE = open_store("memory://format-tfrecord")
IMAGE, LABEL = "image/encoded", "image/class/label"


def record(number: int) -> bytes:
    """One as TensorFlow's scripts for ImageNet write them."""
    return example(
        {
            "image/height": 10,
            "image/colorspace": b"RGB",
            "image/class/text": f"class {number}".encode(),
            LABEL: number,
            IMAGE: bytes([number]) * (number * 37 % 200 + 1),
            "image/object/bbox/xmin": [0.5, 0.25],
        }
    )


RECORDS = [record(number) for number in range(8)]


def scan(data: bytes, fields: Fields | None = None) -> list[Found | Bad]:
    """What a file of these bytes holds; every sample found lies in it."""
    STORE.put("a.tfrecord", data)
    shard_bytes = ShardBytes(STORE, ObjectInfo("a.tfrecord", len(data)))
    found = list(module.scan(shard_bytes, fields or Fields()))
    for one in found:
        if isinstance(one, Found):
            assert one.offset >= 0 and one.length >= 0 and one.offset + one.length <= len(data)
    return found


def contents(records: list[bytes], fields: Fields | None = None) -> list[tuple[bytes, Any]]:
    """Image and label of every record; none may be bad."""
    data = tfrecord(records)
    found = scan(data, fields)
    assert all(isinstance(one, Found) for one in found), found
    return [
        (data[one.offset : one.offset + one.length], one.label) for one in found if isinstance(one, Found)
    ]


def problem(one: bytes, fields: Fields | None = None) -> str:
    """Why this record cannot be used; those around it can."""
    before, middle, after = scan(tfrecord([RECORDS[1], one, RECORDS[2]]), fields)
    if fields is None:
        assert isinstance(before, Found) and isinstance(after, Found)
    assert isinstance(middle, Bad) and middle.name == "1" and "\n" not in middle.problem
    return middle.problem


def refusal(data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        scan(data)
    assert "\n" not in str(caught.value) and "shard a.tfrecord" in str(caught.value)
    return str(caught.value)


def test_images_and_labels_in_order() -> None:
    assert contents(RECORDS) == [(bytes([n]) * (n * 37 % 200 + 1), n) for n in range(8)]
    assert [one.name for one in scan(tfrecord(RECORDS))] == [str(n) for n in range(8)]


def test_any_order_of_features_and_other_fields_between() -> None:
    image, label = (
        field(1, field(1, IMAGE.encode()) + field(2, feature(b"I"))),
        field(1, field(2, feature(7)) + field(1, LABEL.encode())),
    )
    odd = varint(9 << 3 | 5) + b"1234" + varint(10 << 3 | 1) + b"12345678" + varint(11 << 3) + varint(1 << 40)
    for inner in (image + label, label + image, image + odd + label, odd + label + field(30, b"x") + image):
        for whole in (field(1, inner), odd + field(1, inner) + odd, field(1, image) + field(1, label)):
            assert contents([whole]) == [(b"I", 7)]


def test_last_entry_of_a_name_counts() -> None:
    first, last = example({IMAGE: b"old", LABEL: 1}), example({IMAGE: b"new", LABEL: 2})
    assert contents([first + last]) == [(b"new", 2)]


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 1000, 1 << 40, (1 << 63) - 1, -1, -(1 << 63)])
def test_labels_packed_and_unpacked(number: int) -> None:
    for packed in (True, False):
        assert contents([example({IMAGE: b"x", LABEL: number}, packed=packed)]) == [(b"x", number)]


def test_which_features_are_taken() -> None:
    assert contents([example({"image": b"png", "label": 3})]) == [(b"png", 3)]
    assert contents([example({IMAGE: b"jpg", "image": b"?", "image/class/text": b"cat"})]) == [
        (b"jpg", "cat")
    ]
    assert contents([example({IMAGE: b"jpg", "label": b" 12 "})]) == [(b"jpg", 12)]
    assert contents([example({IMAGE: b"jpg"})]) == [(b"jpg", None)]
    both = example({IMAGE: b"jpg", "thumb": b"t", "shape": b"round"})
    assert contents([both], Fields("thumb", "shape")) == [(b"t", "round")]


def test_what_cannot_be_used() -> None:
    assert "no feature 'image/encoded', 'image', only 'x', 'y'" in problem(example({"x": b"1", "y": 2}))
    assert "only none" in problem(b"")
    assert "no feature 'z', only" in problem(RECORDS[0], Fields("z"))
    assert "no feature 'z', only" in problem(RECORDS[0], Fields(None, "z"))
    assert "several values" in problem(example({IMAGE: [b"1", b"2"]}))
    assert "its kind is 'int'" in problem(example({IMAGE: 3}))
    assert "its kind is 'none'" in problem(example({IMAGE: bytearray()}))
    assert "its kind is 'bytes'" in problem(example({IMAGE: bytearray(field(1, b""))}))
    assert "several values" in problem(example({IMAGE: b"x", LABEL: [1, 2]}))
    assert "several values" in problem(example({IMAGE: b"x", LABEL: [b"a", b"b"]}))
    assert "its kind is 'float'" in problem(example({IMAGE: b"x", LABEL: 0.5}))
    assert problem(example({IMAGE: b"x", LABEL: b"\xff"})) == "its label is no text"
    assert problem(example({IMAGE: b"x", LABEL: b"x" * 5000})) == "its label has 5000 bytes"
    many = problem(example({f"feature {n:03}": n for n in range(50)}))
    assert "'feature 007' and 42 more" in many


def test_empty_image_is_found_where_it_is() -> None:
    """That it has no bytes is seen by who looks at the images."""
    (found,) = scan(tfrecord([example({IMAGE: b"", LABEL: 1})]))
    assert isinstance(found, Found) and found.length == 0


def test_other_messages() -> None:
    context = field(1, field(1, field(1, b"id") + field(2, feature(1))))
    assert "SequenceExample" in problem(context + field(2, field(1, b"")))
    assert "wire type 3" in problem(varint(1 << 3 | 3))
    assert "number 0" in problem(varint(0 << 3) + b"\1")
    assert "longer than what it is in" in problem(
        field(1, field(1, varint(1 << 3 | 2) + varint(100) + b"short"))
    )
    assert "longer than what it is in" in problem(varint(1 << 3 | 2) + varint((1 << 64) - 1) + b"x")
    assert "longer than what it is in" in problem(varint(1 << 3 | 1) + b"1234567")
    assert "does not end" in problem(b"\xff" * 11)
    assert "does not end" in problem(b"\x08\xff")
    twice = field(1, field(1, IMAGE.encode()) + field(2, feature(b"1")) + field(2, feature(b"2")))
    assert "two values" in problem(field(1, twice))
    assert "two lists" in problem(example({IMAGE: bytearray(feature(b"1") + feature(2))}))


def test_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK_BYTES", 64)
    test_images_and_labels_in_order()


def test_cut_off_at_any_byte() -> None:
    data = tfrecord(RECORDS[:3])
    ends = [len(tfrecord(RECORDS[:count])) for count in range(4)]
    for length in range(len(data)):
        if length in ends:
            assert len(scan(data[:length])) == ends.index(length)
        else:
            assert "cut off" in refusal(data[:length]) or length < 12


def test_damaged_bytes_are_bad_and_damaged_lengths_end_the_scan() -> None:
    data = tfrecord(RECORDS[:3])
    start = len(tfrecord(RECORDS[:1]))
    for at in range(start, len(tfrecord(RECORDS[:2]))):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        if at < start + 12:
            assert f"record 1 at byte {start}: its length is damaged" in refusal(damaged)
        else:
            first, second, third = scan(damaged)
            assert isinstance(first, Found) and isinstance(third, Found)
            assert second == Bad("1", "it fails its checksum; it is damaged")


def test_length_beyond_the_end() -> None:
    for length in (1 << 30, (1 << 64) - 1):
        head = struct.pack("<Q", length)
        assert "the file is cut off" in refusal(head + struct.pack("<I", masked_crc32c(head)) + b"x" * 50)


def test_records_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RECORD", len(RECORDS[3]) - 1)
    found = scan(tfrecord([RECORDS[0], RECORDS[3], RECORDS[1]]))
    assert [type(one) for one in found] == [Found, Bad, Found]


def test_other_files() -> None:
    data = tfrecord(RECORDS)
    assert "compressed (gzip)" in refusal(gzip.compress(data))
    for level in (1, 5, 6, 9):
        assert "compressed (zlib)" in refusal(zlib.compress(data, level))
    for other in (b"x", b"\x1f", b"hello, this is no such file", b"\0" * 100):
        assert "is no TFRecord file" in refusal(other)
    assert scan(b"") == []


@given(st.data())
def test_random_damage_with_right_checksums(data: st.DataObject) -> None:
    """A record's bytes in any form: found within the record, or bad."""
    whole = bytearray(RECORDS[data.draw(st.integers(0, 7))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(min_size=1, max_size=4))
    found = scan(tfrecord([bytes(whole), RECORDS[0]]))
    assert len(found) == 2 and isinstance(found[1], Found)
    if isinstance(found[0], Found):
        assert found[0].offset >= 12 and found[0].offset + found[0].length <= 12 + len(whole)


@given(st.data())
def test_random_damage_is_one_clear_error(data: st.DataObject) -> None:
    whole = bytearray(tfrecord(RECORDS))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(min_size=1, max_size=4))
    if bytes(whole) == tfrecord(RECORDS):
        return
    try:
        found = scan(bytes(whole))
    except DataError as error:
        assert "shard a.tfrecord" in str(error) and "\n" not in str(error)
    else:
        assert len(found) == 8 and any(isinstance(one, Bad) for one in found)


def _entries(record: bytes) -> list[tuple[bytes, tuple[int, int]]] | str:
    try:
        return list(messages.entries(record))
    except messages.MalformedError as error:
        return str(error)


@given(st.data())
def test_the_short_way_finds_what_the_long_one_finds(data: st.DataObject) -> None:
    whole = bytearray(RECORDS[data.draw(st.integers(0, 7))])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + 1] = data.draw(
            st.sampled_from([b"\x0a", b"\x12", b"\0", b"\1", b"\x80", b"", b"\x0a\1"])
        )
    short = _entries(bytes(whole))
    with patch.object(messages, "_plain_entry", return_value=None):
        assert _entries(bytes(whole)) == short


@given(st.binary(max_size=200))
def test_any_record(one: bytes) -> None:
    (found,) = scan(tfrecord([one]))
    assert isinstance(found, Bad) or found.offset + found.length <= 12 + len(one)


@pytest.mark.parametrize(
    ("base", "claimed"),
    [
        ("a.tfrecord", True), ("a.tfrecords", True), ("a.tfrec", True), ("train-00000-of-01024", True),
        ("imagenet2012-train.tfrecord-00000-of-01024", True), ("a.tfrecord.gz", True), ("a.TFRecord", True),
        ("train-00000-of-01024.gz", True), ("a.tfrecord.idx", False), ("train-00000-of-00002.parquet", False),
        ("x-00000-of-00002.tar", False), ("features.json", False), ("a.txt", False),
    ],
)  # fmt: skip
def test_claims(base: str, claimed: bool) -> None:
    assert module.claims(base) is claimed


def test_files_by_name_and_only_one_set() -> None:
    def listed(*keys: str) -> list[str]:
        return [info.key for info in module.shards_of(STORE, "f", [ObjectInfo(key, 1) for key in keys])]

    assert listed("f/a.tfrecord", "f/a.tfrecord.idx", "f/b/c.tfrecord", "f/info.json") == [
        "f/a.tfrecord",
        "f/b/c.tfrecord",
    ]
    assert listed("f/t-00000-of-00002", "f/t-00001-of-00002") == ["f/t-00000-of-00002", "f/t-00001-of-00002"]
    for other in ("f/v-00000-of-00002", "f/t-00000-of-00003", "f/sub/t-00000-of-00002"):
        with pytest.raises(UsageError, match=r"2 sets of TFRecord files \(.*-\?\?\?\?\?-of-00002"):
            listed("f/t-00000-of-00002", other)
