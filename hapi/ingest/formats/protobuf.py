"""Reader of tf.train.Example as far as needed to find a feature's bytes: the wire format of protocol buffers,
by hand.

    message Example   { Features features = 1; }                    tensorflow/core/example/example.proto
    message Features  { map<string, Feature> feature = 1; }         tensorflow/core/example/feature.proto
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }                 Int64List: repeated int64, packed or not

The library would hand out copies of the values instead of their locations. As in the library, a name's last
entry counts, and fields of other numbers are skipped. Forms that no encoder writes (one feature with two
kinds of values) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 (groups) are not used by these messages."""
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_ENTRY, _NAME, _VALUE = 1 << 3 | _LENGTH, 1 << 3 | _LENGTH, 2 << 3 | _LENGTH
"""First bytes of an entry of the map, of its name, of its value."""
_MAX_SHIFT = 63
"""A varint has at most ten bytes."""
KINDS = {1: "bytes", 2: "float", 3: "int"}

# Plain tuples and few calls: a dataset has millions of these messages.
FieldRange = tuple[int, int]
"""Bytes from..to of the record."""
Field = tuple[int, int, int, int]
"""A field of a message: its number, its wire type, and from..to of its content (for a varint: the varint itself)."""
Feature = tuple[str, FieldRange]
"""A feature: one of :data:`KINDS` ("none" when it has no values), and its list."""


class MalformedError(ValueError):
    """The bytes are no such message; the text has the reason."""


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the number that begins at byte ``at``, cut to 64 bits as everywhere, and where it ends."""
    value = shift = 0
    while at < stop and shift <= _MAX_SHIFT:
        byte = data[at]
        at += 1
        if byte < 0x80:
            return (value | byte << shift) & 0xFFFF_FFFF_FFFF_FFFF, at
        value |= (byte & 0x7F) << shift
        shift += 7
    raise MalformedError("a number does not end")


def field_at(data: bytes, at: int, stop: int) -> Field:
    """Return the field that begins at byte ``at`` and ends by ``stop``; :class:`MalformedError` if it does
    not.
    """
    tag, start = varint(data, at, stop)
    wire = tag & 7
    if wire == _LENGTH:
        length, start = varint(data, start, stop)
        end = start + length
    elif wire == _VARINT:
        _, end = varint(data, start, stop)
    elif wire in _FIXED:
        end = start + _FIXED[wire]
    else:
        raise MalformedError(f"a field has wire type {wire}")
    if end > stop:
        raise MalformedError("a field is longer than what it is in")
    if tag < 8:
        raise MalformedError("a field has number 0")
    return tag >> 3, wire, start, end


def message(data: bytes, at: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in ``data[at:stop]``; :class:`MalformedError` unless they fill it."""
    while at < stop:
        found = field_at(data, at, stop)
        yield found
        at = found[3]


def entries(record: bytes) -> Iterator[tuple[bytes, FieldRange]]:
    """Name and value (a Feature's span) of every feature in an Example, in the order of the record."""
    for number, wire, start, end in message(record, 0, len(record)):
        if number == 2 and wire == _LENGTH:
            raise MalformedError("it is a tf.train.SequenceExample")
        at = start if number == 1 and wire == _LENGTH else end
        while at < end:
            entry = _plain_entry(record, at, end)
            if entry is None:
                number, wire, first, at = field_at(record, at, end)
                if number != 1 or wire != _LENGTH:
                    continue
                entry = _entry(record, first, at)
            else:
                at = entry[1][1]
            yield entry


def _plain_entry(record: bytes, at: int, stop: int) -> tuple[bytes, FieldRange] | None:
    """The entry at byte ``at`` if it has the usual form, a short name and then the value; else None.

    :func:`_entry` would find the same in three times the time.
    """
    if record[at] != _ENTRY:
        return None
    start = at + 2
    if start > stop or (length := record[at + 1]) >= 0x80:
        length, start = varint(record, at + 1, stop)
    end = start + length
    if length < 4 or end > stop or record[start] != _NAME:
        return None
    value = start + 2 + record[start + 1]
    if record[start + 1] >= 0x80 or value >= end or record[value] != _VALUE:
        return None
    first = value + 2
    if first > end or (size := record[value + 1]) >= 0x80:
        size, first = varint(record, value + 1, end)
    return (record[start + 2 : value], (first, end)) if first + size == end else None


def _entry(record: bytes, start: int, end: int) -> tuple[bytes, FieldRange]:
    name, value = b"", (start, start)
    seen = 0
    for number, wire, first, last in message(record, start, end):
        if wire == _LENGTH and number == 1:
            name = record[first:last]
        elif wire == _LENGTH and number == 2:
            value = first, last
            seen += 1
    if seen > 1:
        raise MalformedError("a feature has two values")
    return name, value


def find(record: bytes, names: Set[bytes]) -> dict[bytes, FieldRange]:
    """Return those of the features ``names`` that the Example ``record`` has; :class:`MalformedError` if it
    is none.
    """
    return {name: field_range for name, field_range in entries(record) if name in names}


def feature(record: bytes, field_range: FieldRange) -> Feature:
    """The Feature at ``field_range`` of the record."""
    kind, values = "none", (field_range[0], field_range[0])
    for number, wire, start, end in message(record, *field_range):
        if wire == _LENGTH and number in KINDS:
            if kind != "none":
                raise MalformedError("a feature has two lists of values")
            kind, values = KINDS[number], (start, end)
    return kind, values


def bytes_values(record: bytes, values: FieldRange) -> list[FieldRange]:
    """Return where the values of a list of bytes lie; two at most, enough to see that it is not a single one."""
    found: list[FieldRange] = []
    for number, wire, start, end in message(record, *values):
        if number == 1 and wire == _LENGTH:
            found.append((start, end))
            if len(found) == 2:
                break
    return found


def int_values(record: bytes, values: FieldRange) -> list[int]:
    """Return the values of a list of whole numbers; two at most."""
    found: list[int] = []
    for number, wire, start, end in message(record, *values):
        at = start if number == 1 and wire in (_VARINT, _LENGTH) else end
        while at < end and len(found) < 2:
            value, at = varint(record, at, end)
            found.append(value - (1 << 64) if value >> 63 else value)
    return found
