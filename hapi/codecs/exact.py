"""Exact codecs, block by block: every bit comes back, and memory is bounded by a block.

Encoded bytes are a row of blocks, each of :data:`BLOCK_BYTES` raw bytes but the last::

    kind     u8       0: raw bytes; else a sum of ZEROS, PLANES, ROTATED
    length   u32      bytes of the body, little-endian; less than the raw ones, but for kind 0
    body     ZEROS:   bitmap, after its length where there are planes; then the elements that are not zero
             PLANES:  for each plane its length u32, and its bytes
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from hapi.codecs import planes, zeros
from hapi.codecs.zeros import Words
from hapi.errors import WireError

Buffer = bytes | bytearray | memoryview
Fill = Callable[[memoryview], None]
"""Fills a buffer with the bytes that come next, or raises :class:`WireError`."""

BLOCK_BYTES = 1 << 20
"""Raw bytes of a block; a multiple of every element's length."""
ZEROS, PLANES, ROTATED = 1, 2, 4
_HEAD = struct.Struct("<BI")
HEAD_BYTES = _HEAD.size
"""Bytes before each block."""


def encode(codec: str, data: Buffer, itemsize: int) -> list[Buffer]:
    """Return ``data`` as blocks.

    Args:
        codec: one of :data:`hapi.codecs.names.EXACT`.
        data: the raw bytes.
        itemsize: bytes of an element, one of :data:`hapi.codecs.names.ITEM_BYTES`.

    Returns:
        The buffers in order; those of raw blocks are parts of ``data``.
    """
    view, found = memoryview(data).cast("B"), list[Buffer]()
    for start in range(0, len(view), BLOCK_BYTES):
        found += _block(codec, view[start : start + BLOCK_BYTES], itemsize)
    return found


def decode(fill: Fill, encoded_bytes: int, out: memoryview, itemsize: int) -> None:
    """Decode blocks into ``out``, each as it comes.

    Args:
        fill: gives the encoded bytes.
        encoded_bytes: their number in all.
        out: the raw bytes go here; writable, of the exact raw length. Undefined after an error.
        itemsize: bytes of an element.

    Raises:
        WireError: the bytes are not blocks of that many raw bytes.
    """
    body = memoryview(bytearray(min(BLOCK_BYTES, len(out))))
    head = memoryview(bytearray(HEAD_BYTES))
    for start in range(0, len(out), BLOCK_BYTES):
        raw = out[start : start + BLOCK_BYTES]
        encoded_bytes -= HEAD_BYTES
        if encoded_bytes < 0:
            raise WireError("encoded block: cut off")
        fill(head)
        kind, length = _HEAD.unpack(head)
        encoded_bytes -= length
        if encoded_bytes < 0 or length > len(raw) or (length == len(raw)) != (kind == 0):
            raise WireError(f"encoded block: {length} bytes of kind {kind} for {len(raw)} raw ones")
        if kind == 0:
            fill(raw)
        else:
            fill(body[:length])
            _decode_block(kind, body[:length], raw, itemsize)
    if encoded_bytes:
        raise WireError(f"encoded blocks: {encoded_bytes} bytes too many")


def _block(codec: str, raw: memoryview, itemsize: int) -> list[Buffer]:
    if len(raw) % itemsize == 0:
        kind, body = _body(codec, np.frombuffer(raw, dtype=f"<u{itemsize}"))
        length = sum(map(len, body))
        if kind and length < len(raw):
            return [_HEAD.pack(kind, length), *body]
    return [_HEAD.pack(0, len(raw)), raw]


def _body(codec: str, words: Words) -> tuple[int, list[Buffer]]:
    """Kind and bytes of an encoded block; kind 0 when there is nothing to gain."""
    kind, body = 0, list[Buffer]()
    if "zeros" in codec and zeros.worthwhile(words):
        bitmap, words = zeros.split(words)
        kind = ZEROS
        if codec == "zeros":
            return kind, [bitmap.data, words.view(np.uint8).data]
        packed = planes.pack(bitmap)
        body = [planes.LENGTH.pack(len(packed)), packed]
    if "planes" in codec:
        rotated = planes.signed(words)
        kind += PLANES + ROTATED * rotated
        body += planes.split(words, rotated=rotated)
    return kind, body


def _decode_block(kind: int, body: memoryview, raw: memoryview, itemsize: int) -> None:
    if kind not in (ZEROS, PLANES, PLANES + ROTATED, ZEROS + PLANES, ZEROS + PLANES + ROTATED):
        raise WireError(f"encoded block: unknown kind {kind}")
    if len(raw) % itemsize:
        raise WireError(f"encoded block: {len(raw)} bytes are no elements of {itemsize}")
    out = np.frombuffer(raw, dtype=f"<u{itemsize}")
    rotated = bool(kind & ROTATED)
    if not kind & ZEROS:
        out[:] = planes.join(body, len(out), itemsize, rotated=rotated)
        return
    length = zeros.bitmap_bytes(len(out))
    if kind & PLANES:
        packed, remainder = planes.section(body)
        places = zeros.positions(planes.unpack(packed, "<u1", length), len(out))
        values = planes.join(remainder, len(places), itemsize, rotated=rotated)
    else:
        if len(body) < length:
            raise WireError("encoded zeros: the bitmap is cut off")
        places = zeros.positions(np.frombuffer(body[:length], dtype=np.uint8), len(out))
        values = _elements(body[length:], itemsize)
    zeros.join(places, values, out)


def _elements(raw: memoryview, itemsize: int) -> Words:
    if len(raw) % itemsize:
        raise WireError(f"encoded zeros: {len(raw)} bytes are no elements of {itemsize}")
    return np.frombuffer(raw, dtype=f"<u{itemsize}")
