"""Rows of equal length, each encoded by itself: a row that does not shrink, or would be rounded, stays raw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hapi.arrays import Bytes, IntArray
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.exact import Buffer
from hapi.codecs.names import AT_REST, LOSSY, NONE, Codec
from hapi.errors import UnprocessableError, WireError


class EncodedRows(NamedTuple):
    """n rows as they are stored."""

    data: Bytes
    """All of them, one after the other."""
    lengths: IntArray
    """Bytes of each; int64 [n]."""
    codecs: Bytes
    """Numbers of their codecs in :data:`hapi.codecs.names.AT_REST`; uint8 [n]."""


def encode_rows(codec: Codec, rows: Sequence[Buffer], itemsize: int) -> EncodedRows:
    """Return ``rows`` encoded.

    Args:
        codec: one of :data:`hapi.codecs.names.AT_REST`.
        rows: raw bytes of each.
        itemsize: bytes of an element.
    """
    number, parts = AT_REST.index(codec), list[Buffer]()
    lengths = np.zeros(len(rows), dtype=np.int64)
    codecs = np.full(len(rows), number, dtype=np.uint8)
    for place, row in enumerate(rows):
        buffers = (_small if codec in LOSSY else encode)(codec, row, itemsize)
        if buffers is None:
            buffers, codecs[place] = [row], AT_REST.index(NONE)
        parts += buffers
        lengths[place] = sum(map(len, buffers))
    return EncodedRows(np.frombuffer(b"".join(parts), dtype=np.uint8), lengths, codecs)


def _small(codec: Codec, row: Buffer, itemsize: int) -> list[Buffer] | None:
    """A row that was rounded by ``codec`` before, in its bytes; None where a bit of it would not come back."""
    try:
        buffers = encode(codec, row, itemsize)
    except UnprocessableError:
        return None
    if buffers is None:
        return None
    raw = np.frombuffer(row, dtype=np.uint8)
    out = np.empty_like(raw)
    decode_into(codec, b"".join(buffers), out.data, itemsize)
    return buffers if np.array_equal(raw, out) else None


def decode_row(number: int, encoded: Bytes, out: Bytes, itemsize: int) -> bool:
    """Decode a row into ``out``; return whether ``encoded`` is one.

    Args:
        number: of its codec in :data:`hapi.codecs.names.AT_REST`.
        encoded: its bytes as they are stored.
        out: its raw bytes go here; undefined where it is none.
        itemsize: bytes of an element.
    """
    if not 0 < number < len(AT_REST):
        return False
    try:
        decode_into(AT_REST[number], encoded.data, out.data, itemsize)
    except WireError:
        return False
    return True
