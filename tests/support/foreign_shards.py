"""Encoders of foreign formats for the tests, written from the formats' descriptions and not with Hapi's parsers.

Checked once by hand against the real libraries: MosaicML streaming 0.13's ``MDSWriter`` writes byte for byte what
:func:`mds_shard` and :func:`mds_index` make of the same samples; what :func:`tfrecord` makes of :func:`example` is byte
for byte what tfrecord 1.14's ``TFRecordWriter`` writes, but for the order of the features, which is left open there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import xxhash

SIZES = {
    "int": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
Value = bytes | str | int


def _encode(encoding: str, value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if encoding in SIZES:
        return int(value).to_bytes(SIZES[encoding], "little", signed=not encoding.startswith("u"))
    return str(value).encode()


def mds_config(
    columns: Mapping[str, str], *, hashes: Sequence[str] = (), size_limit: int | None = 1 << 26
) -> dict[str, Any]:
    """What a shard says about itself, and the index about each shard."""
    names = sorted(columns)
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": list(hashes),
        "size_limit": size_limit,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [SIZES.get(columns[name]) for name in names],
    }


def mds_shard(
    columns: Mapping[str, str],
    samples: Sequence[Mapping[str, Value]],
    config: Mapping[str, Any] | None = None,
) -> bytes:
    """A shard of ``samples``; ``config`` in place of its own description of the columns."""
    text = json.dumps(config or mds_config(columns), sort_keys=True).encode()
    records = []
    for sample in samples:
        parts = [(columns[name], _encode(columns[name], sample[name])) for name in sorted(columns)]
        sizes = b"".join(struct.pack("<I", len(part)) for encoding, part in parts if encoding not in SIZES)
        records.append(sizes + b"".join(part for _, part in parts))
    places = [4 + 4 * (len(records) + 1) + len(text)]
    for record in records:
        places.append(places[-1] + len(record))
    return (
        struct.pack("<I", len(records)) + struct.pack(f"<{len(places)}I", *places) + text + b"".join(records)
    )


def mds_index(columns: Mapping[str, str], shards: Mapping[str, bytes], hashes: Sequence[str] = ()) -> bytes:
    """The ``index.json`` of ``shards`` by their names."""
    entries = []
    for name, data in shards.items():
        digests = {
            kind: (
                getattr(xxhash, kind)(data) if kind.startswith("xxh") else hashlib.new(kind, data)
            ).hexdigest()
            for kind in hashes
        }
        raw = {"basename": name, "bytes": len(data), "hashes": digests}
        count = int.from_bytes(data[:4], "little")
        entries.append(
            {**mds_config(columns, hashes=hashes), "samples": count, "raw_data": raw, "zip_data": None}
        )
    return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


@cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, bits reflected) as TFRecord writes it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    """A number of the wire format; negative ones as 64 bits in two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def field(number: int, content: bytes) -> bytes:
    """A field of bytes (or of a message)."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(value: bytes | int | float | Sequence[bytes] | Sequence[int], *, packed: bool = True) -> bytes:
    """A Feature of one value or several of one kind."""
    values: Sequence[Any] = [value] if isinstance(value, bytes | int | float) else value
    if isinstance(values[0], bytes):
        return field(1, b"".join(field(1, one) for one in values))
    if isinstance(values[0], float):
        return field(2, field(1, np.array(values, dtype="<f4").tobytes()))
    if packed:
        return field(3, field(1, b"".join(varint(one) for one in values)))
    return field(3, b"".join(b"\x08" + varint(one) for one in values))


def example(features: Mapping[str, Any], *, packed: bool = True) -> bytes:
    """An Example; a value that is a ``bytearray`` is taken for a whole Feature."""
    entries = []
    for name, value in features.items():
        content = bytes(value) if isinstance(value, bytearray) else feature(value, packed=packed)
        entries.append(field(1, field(1, name.encode()) + field(2, content)))
    return field(1, b"".join(entries))


def tfrecord(records: Sequence[bytes]) -> bytes:
    """A file of ``records``."""
    out = bytearray()
    for record in records:
        head = struct.pack("<Q", len(record))
        out += head + struct.pack("<I", masked_crc32c(head))
        out += record + struct.pack("<I", masked_crc32c(record))
    return bytes(out)
