"""TFRecord: files of records, each a tf.train.Example (``example.py``) with an encoded image and a label.

A record (tensorflow/core/lib/io/record_writer.cc; little endian) is the length (u64), the length's checksum (u32), the
bytes, and the bytes' checksum (u32). A checksum is a CRC-32C, rotated and shifted ("masked") because a CRC over data
that contains its own CRC says little. Labels are taken as they are, also those of ImageNet that count from 1.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from hapi.errors import DataError, UsageError
from hapi.ingest.formats.protobuf import (
    FieldRange,
    MalformedError,
    bytes_values,
    entries,
    feature,
    find,
    int_values,
)
from hapi.ingest.formats.shard import Bad, Fields, Found, Label, ShardBytes, label_of
from hapi.store.base import ObjectInfo, ObjectStore

NAME = "tfrecord"
IMAGES = ("image/encoded", "image")
LABELS = ("image/class/label", "label", "image/class/text")
"""Features used as labels, the first that a record has: those of TensorFlow's ImageNet scripts and datasets.
"""
_FILE = re.compile(r"(.+?)(\.tfrec(?:ord)?s?)?(-\d+-of-\d+)?(\.gz|\.gzip|\.zlib)?", re.IGNORECASE | re.DOTALL)
_HEAD = struct.Struct("<QI")
_AROUND = _HEAD.size + 4
_MAX_RECORD = 256 << 20
"""Bytes. A record is held in memory while it is looked at, one of each shard that is being read."""
_MAX_TEXT = 4 << 10
_MASK = 0xA282_EAD8

Crc = Callable[[bytes], int]


class _WrongError(Exception):
    """Reason why a record cannot be used."""


@dataclass(frozen=True)
class _Wanted:
    """Features that are taken for the image and the label, the first that a record has."""

    images: tuple[bytes, ...]
    labels: tuple[bytes, ...]
    all: frozenset[bytes]
    label_needed: bool
    """The user named it."""

    @classmethod
    def of(cls, fields: Fields) -> Self:
        images = _encoded(IMAGES if fields.image is None else (fields.image,))
        named = LABELS if fields.label is None else (fields.label,)
        labels = _encoded(() if fields.unlabelled else named)
        needed = fields.label is not None and not fields.unlabelled
        return cls(images, labels, frozenset((*images, *labels)), needed)


def _encoded(names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(name.encode(errors="surrogateescape") for name in names)


def claims(base: str) -> bool:
    """Return whether this last part of a key is a TFRecord file's: ``x.tfrecord``, ``train-00000-of-01024``,
    and the like.
    """
    match = _FILE.fullmatch(base)
    return match is not None and bool(match[2] or match[3])


def shards_of(store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the files by name; :class:`UsageError` when they are several sets (``train-..-of-8``,
    ``validation-..-of-2``).
    """
    found: list[ObjectInfo] = []
    sets: set[str] = set()
    for info in objects:
        path, slash, base = info.key.rpartition("/")
        match = _FILE.fullmatch(base)
        if match is None or not (match[2] or match[3]):
            continue
        found.append(info)
        if match[3]:
            number, _, count = match[3][1:].partition("-of-")
            sets.add(f"{path}{slash}{match[1]}{match[2] or ''}-{'?' * len(number)}-of-{count}")
    if len(sets) > 1:
        names = ", ".join(sorted(sets)[:5])
        raise UsageError(
            f"{store.url}/{folder} has {len(sets)} sets of TFRecord files ({names}); they are not mixed: give the "
            "folder of one, or a pattern of its names, as in 'set/train-*'"
        )
    return found


def scan(shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]:
    """Yield the records of a file in their order."""
    crc = _crc32c()
    wanted = _Wanted.of(fields)
    at = number = 0
    while at < shard.size:
        length = _length(shard, at, number, crc)
        yield _sample(shard, at + _HEAD.size, length, str(number), crc, wanted)
        at += length + _AROUND
        number += 1


def _crc32c() -> Crc:
    """CRC-32C of bytes; :class:`UsageError` when the library that has it is not installed."""
    try:
        value: Crc = importlib.import_module("google_crc32c").value
    except ImportError:
        raise UsageError(
            "TFRecord files have checksums that need google-crc32c, which is not installed: "
            "pip install 'hapi-split[tfrecord]'"
        ) from None
    return value


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFF_FFFF


def _length(shard: ShardBytes, at: int, number: int, crc: Crc) -> int:
    """Length of the record at byte ``at``; :class:`DataError` when the file cannot be read from here on."""
    where = f"shard {shard.name}, record {number} at byte {at}"
    if shard.size - at >= _HEAD.size:
        head = bytes(shard.read(at, _HEAD.size))
        length, checksum = _HEAD.unpack(head)
        if _masked(crc(head[:8])) == checksum:
            if length <= shard.size - at - _AROUND:
                return int(length)
            raise DataError(
                f"{where} has {length} bytes, {shard.size - at - _HEAD.size} are left; the file is cut off"
            )
    elif number:
        raise DataError(f"{where} is cut off: {shard.size - at} bytes are left")
    if number:
        raise DataError(f"{where}: its length is damaged, so the next record cannot be found")
    raise DataError(f"shard {shard.name} {_other_form(bytes(shard.read(0, min(2, shard.size))))}")


def _other_form(begin: bytes) -> str:
    """Likely form of a file whose first record has no sound length."""
    kind = None
    if begin == b"\x1f\x8b":
        kind = "gzip"
    elif len(begin) == 2 and begin[0] & 0x8F == 8 and int.from_bytes(begin, "big") % 31 == 0:  # RFC 1950
        kind = "zlib"
    if kind is None:
        return "is no TFRecord file, or damaged at its beginning"
    return (
        f"is compressed ({kind}), so that samples cannot be read from the middle of it: decompress the files, "
        "or pack the images with 'hapi pack'"
    )


def _sample(shard: ShardBytes, at: int, length: int, name: str, crc: Crc, wanted: _Wanted) -> Found | Bad:
    if length > _MAX_RECORD:
        return Bad(name, f"it has {length} bytes; records up to {_MAX_RECORD} can be indexed in place")
    body = shard.read(at, length + 4)
    record = bytes(body[:length])
    if _masked(crc(record)) != int.from_bytes(body[length:], "little"):
        return Bad(name, "it fails its checksum; it is damaged")
    try:
        found = find(record, wanted.all)
        start, stop = _image(record, found, wanted)
        return Found(at + start, stop - start, _label(record, found, wanted), name)
    except MalformedError as error:
        return Bad(name, f"it is no tf.train.Example ({error}); other records cannot be read in place")
    except _WrongError as error:
        return Bad(name, str(error))


def _first(names: Sequence[bytes], found: Mapping[bytes, FieldRange]) -> bytes | None:
    for name in names:
        if name in found:
            return name
    return None


def _missing(record: bytes, names: Sequence[bytes]) -> _WrongError:
    return _WrongError(
        f"it has no feature {_name_list(names)}, only {_name_list([n for n, _ in entries(record)])}"
    )


def _name_list(names: Sequence[bytes]) -> str:
    text = ", ".join(repr(name[:40].decode(errors="replace")) for name in names[:8]) or "none"
    return text + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _image(record: bytes, found: Mapping[bytes, FieldRange], wanted: _Wanted) -> tuple[int, int]:
    name = _first(wanted.images, found)
    if name is None:
        raise _missing(record, wanted.images)
    kind, list_ = feature(record, found[name])
    values = bytes_values(record, list_) if kind == "bytes" else []
    if len(values) != 1:
        what = "several values" if values else f"no value of bytes (its kind is {kind!r})"
        raise _WrongError(f"its image feature {_name_list([name])} has {what}; name another with --image")
    return values[0]


def _label(record: bytes, found: Mapping[bytes, FieldRange], wanted: _Wanted) -> Label:
    name = _first(wanted.labels, found)
    if name is None:
        if wanted.label_needed:
            raise _missing(record, wanted.labels)
        return None
    kind, list_ = feature(record, found[name])
    numbers = int_values(record, list_) if kind == "int" else []
    texts = bytes_values(record, list_) if kind == "bytes" else []
    if len(numbers) + len(texts) != 1:
        what = (
            "several values"
            if numbers or texts
            else f"neither a whole number nor text (its kind is {kind!r})"
        )
        raise _WrongError(f"its label feature {_name_list([name])} has {what}; name another with --label")
    if numbers:
        return numbers[0]
    start, stop = texts[0]
    if stop - start > _MAX_TEXT:
        raise _WrongError(f"its label has {stop - start} bytes")
    try:
        return label_of(record[start:stop].decode())
    except UnicodeDecodeError:
        raise _WrongError("its label is no text") from None
