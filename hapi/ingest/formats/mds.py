"""MosaicML MDS: shards of samples with named columns, listed in ``index.json`` (``mds_index.py``).

As the streaming library writes it (version 2, ``base/format/mds/writer.py``; all numbers little endian), a shard is

    u32          number of samples n
    u32 [n + 1]  where in the shard each sample begins, and where the last one ends
    JSON         the columns: their names, encodings and sizes, null when it varies
    n samples    u32 sizes of the columns whose size varies, then the columns' bytes one after the other

The image is a column that holds an encoded one as it is; ``pil`` (raw pixels) and lists of images are refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hapi.errors import DataError
from hapi.ingest.formats.mds_index import MdsShard, listed_shards
from hapi.ingest.formats.shard import Bad, Fields, Found, Label, ShardBytes, label_of
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.wire.documents import parse_document

NAME = "mds"
_SURE_IMAGES = ("jpeg", "png")
_IMAGES = (*_SURE_IMAGES, "bytes")
_NUMBERS = {
    "int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
}  # fmt: skip
"""Encodings of a class number, and how :mod:`struct` calls them."""
_TEXTS = ("str", "str_int")
_LABELS = ("label", "y", "class", "cls", "target")
"""Names of columns that are taken for the label, the first that is there."""
_MAX_COLUMNS_BYTES = 1 << 20
_MAX_FIXED_SIZE = (1 << 32) - 1
_MAX_TEXT = 4 << 10
_TABLE_ENTRIES = 1 << 18
"""Entries of the table that are held at once."""


@dataclass(frozen=True)
class _Column:
    name: str
    encoding: str
    size: int | None
    """Bytes; None: each sample says."""


@dataclass(frozen=True)
class _ColumnPosition:
    """Location of a column: behind ``fixed`` bytes and the first ``varying`` of the columns whose size
    varies.
    """

    column: _Column
    fixed: int
    varying: int

    def byte_range(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Its offset behind a sample's sizes, and its length."""
        length = sizes[self.varying] if self.column.size is None else self.column.size
        return self.fixed + sum(sizes[: self.varying]), length


@dataclass(frozen=True)
class _Layout:
    """Layout of a shard's samples."""

    first: int
    """Offset of the first sample in the shard."""
    head: struct.Struct
    """The sizes at a sample's begin."""
    fixed: int
    """Bytes of the columns of a fixed size."""
    image: _ColumnPosition
    label: _ColumnPosition | None


def claims(base: str) -> bool:
    """Return whether this last part of a key is an MDS shard's, or that of a compressed one, which is refused
    later.
    """
    name, dot, extension = base.lower().rpartition(".")
    return bool(dot) and (extension == "mds" or name.endswith(".mds"))


def shards_of(store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The shards in the order of ``index.json``."""
    return listed_shards(store, folder, objects)


def scan(shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]:
    """The samples of a shard in their order; at its end its digests are checked against ``index.json``."""
    _watch(shard)
    count, table_end = _count(shard)
    layout = _layout(shard, table_end, fields) if count else None
    for number, begin, end in _sample_ranges(shard, count):
        if layout is not None:
            yield _sample(shard, layout, number, begin, end)


def _watch(shard: ShardBytes) -> None:
    """Take the digests that ``index.json`` has while the shard is read, and have them checked at its end."""
    info = shard.info
    promised = info.digests if isinstance(info, MdsShard) else ()
    digests = [(kind, _digest(kind), value) for kind, value in promised]
    for _, digest, _ in digests:
        shard.watch(digest.update)

    def check() -> None:
        for kind, digest, value in digests:
            if digest.hexdigest() != value:
                raise DataError(
                    f"shard {shard.name}: its {kind} is {digest.hexdigest()}, index.json has {value[:130]}: "
                    "it is damaged or another file"
                )

    shard.check_at_end(check)


def _digest(kind: str) -> Any:
    return getattr(xxhash, kind)() if kind in xxhash.algorithms_available else hashlib.new(kind)


def _count(shard: ShardBytes) -> tuple[int, int]:
    """The number of samples, and where the table of their places ends; checked against what is there."""
    count = int.from_bytes(shard.read(0, 4), "little")
    end = 4 + 4 * (count + 1)
    if end > shard.size:
        raise DataError(
            f"shard {shard.name}: it says it has {count} samples, too many for its {shard.size} bytes; "
            "it is cut off or damaged"
        )
    last = int.from_bytes(shard.read(end - 4, 4), "little")
    if last != shard.size:
        what = "cut off or damaged" if last > shard.size else "damaged"
        raise DataError(
            f"shard {shard.name}: its last sample ends at byte {last}, it has {shard.size} bytes; it is {what}"
        )
    info = shard.info
    if isinstance(info, MdsShard) and info.samples != count:
        raise DataError(
            f"shard {shard.name}: it has {count} samples, index.json says {info.samples}; write the index again"
        )
    return count, end


def _sample_ranges(shard: ShardBytes, count: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each sample as the table has them."""
    for first in range(0, count, _TABLE_ENTRIES):
        held = min(_TABLE_ENTRIES, count - first)
        table = np.frombuffer(shard.read(4 + 4 * first, 4 * (held + 1)), dtype="<u4").tolist()
        for row in range(held):
            yield first + row, table[row], table[row + 1]


def _layout(shard: ShardBytes, table_end: int, fields: Fields) -> _Layout:
    first = int.from_bytes(shard.read(4, 4), "little")
    if not 0 < first - table_end <= min(_MAX_COLUMNS_BYTES, shard.size - table_end):
        raise DataError(
            f"shard {shard.name}: its first sample begins at byte {first}, its columns are described from byte "
            f"{table_end} on; it is damaged"
        )
    columns = _columns(shard, shard.read(table_end, first - table_end))
    image = _image(shard, columns, fields.image)
    label = None if fields.unlabelled else _label_column(shard, columns, fields.label)
    varying = sum(column.size is None for column in columns)
    return _Layout(
        first=first,
        head=struct.Struct(f"<{varying}I"),
        fixed=sum(column.size or 0 for column in columns),
        image=_position_of(columns, image),
        label=None if label is None else _position_of(columns, label),
    )


def _position_of(columns: Sequence[_Column], column: _Column) -> _ColumnPosition:
    before = columns[: columns.index(column)]
    return _ColumnPosition(column, sum(c.size or 0 for c in before), sum(c.size is None for c in before))


def _columns(shard: ShardBytes, text: memoryview) -> list[_Column]:
    """The columns as the shard describes them, checked."""
    try:
        document = parse_document(text.tobytes())
        if document["format"] != "mds" or document["version"] != 2:
            raise ValueError("it is not of format mds, version 2")
        parts = (document["column_names"], document["column_encodings"], document["column_sizes"])
        columns = [_column(*row) for row in zip(*parts, strict=True)]
        if len({column.name for column in columns}) != len(columns):
            raise ValueError("two columns have one name")
        return columns
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"shard {shard.name}: its columns' description cannot be understood ({str(error)[:100]}); it is damaged"
        ) from error


def _column(name: Any, encoding: Any, size: Any) -> _Column:
    if not isinstance(name, str) or not isinstance(encoding, str):
        raise ValueError("a column's name or encoding is no text")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise ValueError("a column's size is no whole number")
    if size is not None and not 0 <= size <= _MAX_FIXED_SIZE:
        raise ValueError("a column's size is out of range")
    if encoding in _NUMBERS and size != struct.calcsize(_NUMBERS[encoding]):
        raise ValueError(f"a column of {encoding} has another size")
    return _Column(name, encoding, size or None)  # 0 stands for "varies" too


def _image(shard: ShardBytes, columns: Sequence[_Column], wanted: str | None) -> _Column:
    if wanted is not None:
        column = _named(shard, columns, wanted)
        if column.encoding in _IMAGES:
            return column
        raise DataError(
            f"shard {shard.name}: column {wanted[:80]!r} holds {column.encoding[:40]!r}; only encoded images (columns "
            f"of {', '.join(_IMAGES)}) can be read in place, pack others with 'hapi pack'"
        )
    found = [c for c in columns if c.encoding in _SURE_IMAGES] or [
        c for c in columns if c.encoding in _IMAGES
    ]
    if not found:
        raise DataError(
            f"shard {shard.name}: no column holds encoded images ({', '.join(_IMAGES)}), only {_column_list(columns)}; "
            "pack them with 'hapi pack'"
        )
    if len(found) > 1:
        raise DataError(f"shard {shard.name}: which column is the image? Give --image: {_column_list(found)}")
    return found[0]


def _label_column(shard: ShardBytes, columns: Sequence[_Column], wanted: str | None) -> _Column | None:
    if wanted is not None:
        column = _named(shard, columns, wanted)
        if column.encoding in _NUMBERS or column.encoding in _TEXTS:
            return column
        raise DataError(
            f"shard {shard.name}: column {wanted[:80]!r} holds {column.encoding[:40]!r}; a label is one of "
            f"{', '.join((*_NUMBERS, *_TEXTS))}"
        )
    usable = {c.name: c for c in columns if c.encoding in _NUMBERS or c.encoding in _TEXTS}
    return next((usable[name] for name in _LABELS if name in usable), None)


def _named(shard: ShardBytes, columns: Sequence[_Column], wanted: str) -> _Column:
    for column in columns:
        if column.name == wanted:
            return column
    raise DataError(f"shard {shard.name}: it has no column {wanted[:80]!r}, only {_column_list(columns)}")


def _column_list(columns: Sequence[_Column]) -> str:
    text = ", ".join(f"{column.name[:40]!r} ({column.encoding[:40]})" for column in columns[:10])
    return text + (f" and {len(columns) - 10} more" if len(columns) > 10 else "")


def _sample(shard: ShardBytes, layout: _Layout, number: int, begin: int, end: int) -> Found | Bad:
    name = str(number)
    head = layout.head.size
    if not layout.first <= begin <= end - head <= shard.size - head:
        return Bad(name, f"its place, bytes {begin} to {end}, cannot be; the table of places is damaged")
    sizes = layout.head.unpack(shard.read(begin, head))
    needed = head + layout.fixed + sum(sizes)
    if needed != end - begin:
        return Bad(name, f"its columns need {needed} bytes, it has {end - begin}; it is damaged")
    start, length = layout.image.byte_range(sizes)
    label: Label = None
    if layout.label is not None:
        offset, size = layout.label.byte_range(sizes)
        encoding = layout.label.column.encoding
        if size > _MAX_TEXT:
            return Bad(name, f"its label has {size} bytes")
        try:
            label = _label(shard.read(begin + head + offset, size), encoding)
        except UnicodeDecodeError:
            return Bad(name, "its label is no text")
    return Found(begin + head + start, length, label, name)


def _label(data: memoryview, encoding: str) -> int | str:
    if encoding in _NUMBERS:
        return int(struct.unpack(_NUMBERS[encoding], data)[0])
    return label_of(data.tobytes().decode())
