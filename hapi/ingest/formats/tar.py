"""The members of a tar archive: POSIX ustar, with GNU's and pax's long names and sizes.

Python's ``tarfile`` reads such archives too, but stops without a word at the first header that it does not
understand and takes an archive that was cut off between two members for a whole one. Here both are errors: an
archive ends with a block of zeros. After that only zeros may follow, or another archive (``cat a.tar
b.tar``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hapi.errors import DataError
from hapi.ingest.formats.shard import ShardBytes

BLOCK = 512
_MAX_EXTENSION = 1 << 20
"""Bytes of a long name or of a pax header: more is no name."""
_REGULAR = (b"0", b"\0", b"7")
_SPARSE = b"S"
_LINKS = (b"1", b"2")
_OTHERS = (b"3", b"4", b"5", b"6", b"V")
"""Devices, folders, pipes, the name of a volume. Whatever their size field says, no data follows, nor links."""
_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Member:
    """A file in the archive: its bytes are ``offset..offset + size``."""

    name: str
    offset: int
    size: int
    problem: str | None
    """Reason why its bytes are not the file's; None when they are."""


@dataclass(frozen=True)
class _Header:
    name: str
    size: int
    kind: bytes


def members(shard: ShardBytes) -> Iterator[Member]:
    """Yield the files of the archive in their order; before the next one, the last must be read whole.

    Raises:
        DataError: the archive is cut off or is none; the message names the shard and the place.
    """
    position, ended = 0, False
    common: dict[str, str] = {}
    own: dict[str, str] = {}
    while position < shard.size:
        block = shard.read(position, min(BLOCK, shard.size - position)).tobytes()
        if not block.strip(b"\0"):
            position, ended = _after_zeros(shard, position), True
            continue
        ended = False
        header = _header(shard, position, block)
        data = position + BLOCK
        if header.kind in b"xgLK":
            text = shard.read(data, _extension_size(shard, position, header)).tobytes()
            if header.kind == b"g":
                common |= _pax(shard, position, text)
            else:
                own |= _extension(shard, position, header.kind, text)
            position = data + _padded(header.size)
            continue
        member = _member(shard, position, header, {**common, **own})
        own = {}
        if member is not None:
            _check_inside(shard, member)
            yield member
            position = data + _padded(member.size)
        else:
            position = data
    if not ended or own:
        raise DataError(f"shard {shard.name} is cut off: it does not end as a tar archive does")


def _member(shard: ShardBytes, position: int, header: _Header, fields: dict[str, str]) -> Member | None:
    """The file that a header is of, with its pax fields; None when it is no file and has no data."""
    name = fields.get("GNU.sparse.name", fields.get("path", header.name))
    if header.kind in _OTHERS:
        return None
    if header.kind in _LINKS:
        return Member(name, position + BLOCK, 0, "it is a link")
    if header.kind not in _REGULAR and header.kind != _SPARSE:
        raise _damaged(shard, position, f"has a member of the unknown type {header.kind!r}")
    size = header.size
    if "size" in fields:
        if not (fields["size"].isascii() and fields["size"].isdigit() and len(fields["size"]) < 19):
            raise _damaged(shard, position, "has a pax size that is no number")
        size = int(fields["size"])
    sparse = header.kind == _SPARSE or any(key.startswith("GNU.sparse.") for key in fields)
    return Member(
        name, position + BLOCK, size, "it is a sparse file, which has to be unpacked" if sparse else None
    )


def _check_inside(shard: ShardBytes, member: Member) -> None:
    stop = member.offset + member.size
    if stop > shard.size:
        raise DataError(
            f"shard {shard.name} is cut off in {member.name[:200]!r}: its bytes are {member.offset}..{stop}, "
            f"the shard has {shard.size}"
        )


def _after_zeros(shard: ShardBytes, position: int) -> int:
    """Position of the next archive after a block of zeros, or the shard's end."""
    while position < shard.size:
        length = min(64 * BLOCK, shard.size - position)
        found = np.flatnonzero(np.frombuffer(shard.read(position, length), dtype=np.uint8))
        if len(found):
            return position + int(found[0]) // BLOCK * BLOCK
        position += length
    return position


def _header(shard: ShardBytes, position: int, data: bytes) -> _Header:
    if len(data) < BLOCK:
        raise DataError(f"shard {shard.name} is cut off in the header of a member at byte {position}")
    if position == 0 and (packed := next((v for k, v in _MAGICS.items() if data.startswith(k)), None)):
        raise DataError(
            f"shard {shard.name} is compressed ({packed}), so that samples cannot be read from the middle of it: "
            "unpack the shards, or pack the images with 'hapi pack'"
        )
    if not _is_checksum(data, _number(data[148:156])):
        raise _damaged(shard, position, "has no header of a member there (its checksum is wrong)")
    size = _number(data[124:136])
    if size is None:
        raise _damaged(shard, position, "has a member whose size is no number")
    name = _text(data[:100])
    if data[257:263] == b"ustar\0" and (prefix := _text(data[345:500])):
        name = f"{prefix}/{name}"
    return _Header(name, size, data[156:157])


def _is_checksum(data: bytes, stored: int | None) -> bool:
    """Return whether ``stored`` is the sum of the header's bytes; some writers take them as signed."""
    others = data[:148] + data[156:]
    counted = sum(others) + 8 * 0x20
    return stored == counted or stored == counted - 256 * sum(byte > 127 for byte in others)


def _extension_size(shard: ShardBytes, position: int, header: _Header) -> int:
    if header.size > _MAX_EXTENSION:
        raise _damaged(shard, position, f"has a name or pax header of {header.size} bytes")
    return header.size


def _extension(shard: ShardBytes, position: int, kind: bytes, data: bytes) -> dict[str, str]:
    """Facts of a GNU long name or a pax header about the next member."""
    if kind == b"L":
        return {"path": _text(data)}
    return {} if kind == b"K" else _pax(shard, position, data)


def _pax(shard: ShardBytes, position: int, data: bytes) -> dict[str, str]:
    """Records ``LENGTH KEY=VALUE\\n``, the length counting itself."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at] != 0:
        digits, space, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = data[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if at + length > len(data) or not equals or not value.endswith(b"\n"):
            raise _damaged(shard, position, "has a damaged pax header")
        fields[key.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
        at += length
    return fields


def _number(field: bytes) -> int | None:
    """A numeric field: octal text, or GNU's base 256; None when it is neither, or negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if all(0x30 <= digit <= 0x37 for digit in digits) else None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _damaged(shard: ShardBytes, position: int, problem: str) -> DataError:
    return DataError(f"shard {shard.name} is damaged: at byte {position} it {problem}")
