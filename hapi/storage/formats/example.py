"""tf.train.Example, as far as finding a feature's bytes takes: the wire format of protocol buffers, read by hand.

    message Example   { Features features = 1; }                    tensorflow/core/example/example.proto
    message Features  { map<string, Feature> feature = 1; }         tensorflow/core/example/feature.proto
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }                 Int64List: repeated int64, packed or not

The library would hand out copies of the values, not where they lie. As it does, a name's last entry counts, and fields
of other numbers are passed over. What no encoder writes (one feature with two kinds of values) is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 (groups) are not used by these messages."""
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MAX_SHIFT = 63
"""A varint has at most ten bytes."""
KINDS = {1: "bytes", 2: "float", 3: "int"}


class MalformedError(ValueError):
    """The bytes are no such message; the text says what is wrong."""


class Span(NamedTuple):
    """Bytes ``start..stop`` of the record."""

    start: int
    stop: int


class Field(NamedTuple):
    """A field of a message: its number and wire type, and its content (for a varint: the varint itself)."""

    number: int
    wire: int
    start: int
    stop: int


class Feature(NamedTuple):
    """A feature: one of :data:`KINDS` ("none" when it has no values), and its list's span."""

    kind: str
    values: Span


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """The number that begins at byte ``at``, cut to 64 bits as everywhere, and where it ends."""
    value = shift = 0
    while at < stop and shift <= _MAX_SHIFT:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise MalformedError("a number does not end")


def message(data: bytes, at: int, stop: int) -> Iterator[Field]:
    """The fields of the message in ``data[at:stop]``; each lies within it, or :class:`MalformedError`."""
    while at < stop:
        tag = data[at]
        if tag < 0x80:  # nearly all are one byte long: half of the time of a call
            at += 1
        else:
            tag, at = varint(data, at, stop)
        wire = tag & 7
        start = at
        if wire == _LENGTH:
            length, start = varint(data, at, stop)
            at = start + length
        elif wire == _VARINT:
            _, at = varint(data, at, stop)
        elif wire in _FIXED:
            at += _FIXED[wire]
        else:
            raise MalformedError(f"a field has wire type {wire}")
        if at > stop:
            raise MalformedError("a field is longer than what it is in")
        if tag < 8:
            raise MalformedError("a field has number 0")
        yield Field(tag >> 3, wire, start, at)


def entries(record: bytes) -> Iterator[tuple[bytes, Span]]:
    """Name and value (a Feature's span) of every feature in an Example, in the order of the record."""
    for top in message(record, 0, len(record)):
        if top.wire != _LENGTH or top.number > 2:
            continue
        if top.number == 2:
            raise MalformedError("it is a tf.train.SequenceExample")
        for entry in message(record, top.start, top.stop):
            if entry.number == 1 and entry.wire == _LENGTH:
                yield _entry(record, entry)


def _entry(record: bytes, entry: Field) -> tuple[bytes, Span]:
    name, value = b"", Span(entry.start, entry.start)
    seen = 0
    for part in message(record, entry.start, entry.stop):
        if part.wire != _LENGTH:
            continue
        if part.number == 1:
            name = record[part.start : part.stop]
        elif part.number == 2:
            value = Span(part.start, part.stop)
            seen += 1
    if seen > 1:
        raise MalformedError("a feature has two values")
    return name, value


def find(record: bytes, names: Collection[bytes]) -> dict[bytes, Feature]:
    """Those of the features ``names`` that the Example ``record`` has; :class:`MalformedError` if it is none."""
    found = {name: span for name, span in entries(record) if name in names}
    return {name: _feature(record, span) for name, span in found.items()}


def _feature(record: bytes, span: Span) -> Feature:
    feature = Feature("none", Span(span.start, span.start))
    for part in message(record, *span):
        if part.wire == _LENGTH and part.number in KINDS:
            if feature.kind != "none":
                raise MalformedError("a feature has two lists of values")
            feature = Feature(KINDS[part.number], Span(part.start, part.stop))
    return feature


def bytes_values(record: bytes, values: Span) -> list[Span]:
    """Where the values of a list of bytes lie; two at most, as many as it takes to see that it is not one."""
    found: list[Span] = []
    for part in message(record, *values):
        if part.number == 1 and part.wire == _LENGTH:
            found.append(Span(part.start, part.stop))
            if len(found) == 2:
                break
    return found


def int_values(record: bytes, values: Span) -> list[int]:
    """The values of a list of whole numbers; two at most."""
    found: list[int] = []
    for part in message(record, *values):
        if part.number != 1 or part.wire not in (_VARINT, _LENGTH):
            continue
        at = part.start
        while at < part.stop and len(found) < 2:
            value, at = varint(record, at, part.stop)
            found.append(value - (1 << 64) if value >> 63 else value)
    return found
