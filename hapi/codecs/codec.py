"""Encoding and decoding by a codec's name."""

from __future__ import annotations

from hapi.codecs import exact, lossy
from hapi.codecs.exact import Buffer, Fill
from hapi.codecs.names import EXACT, ITEM_BYTES, LOSSY, NONE
from hapi.errors import WireError


def encode(codec: str, data: Buffer, itemsize: int, rows: int = 1) -> list[Buffer] | None:
    """Return the encoded bytes of a tensor, or None where its raw ones are no more.

    Memory beside the result is bounded by a block. Parts of the result may be parts of ``data``.

    Args:
        codec: one of :data:`hapi.codecs.names.CODECS`.
        data: the raw bytes; for lossy codecs float32 elements.
        itemsize: bytes of an element.
        rows: samples of equal length that the tensor has; of meaning to ``int8``.

    Raises:
        ValueError: the codec is unknown, or does not know such elements.
        UnprocessableError: a finite value is too large for a lossy codec.
    """
    _check(codec, len(memoryview(data).cast("B")), itemsize, rows)
    if codec == NONE:
        return None
    buffers = lossy.encode(codec, data, rows) if codec in LOSSY else exact.encode(codec, data, itemsize)
    return buffers if sum(map(len, buffers)) < len(memoryview(data).cast("B")) else None


def decode(codec: str, fill: Fill, encoded_bytes: int, out: memoryview, itemsize: int, rows: int = 1) -> None:
    """Decode a tensor as its bytes come.

    Args:
        codec: one of :data:`hapi.codecs.names.CODECS`.
        fill: gives the encoded bytes.
        encoded_bytes: their number.
        out: the raw bytes go here; writable, of the exact raw length. Undefined after an error.
        itemsize: bytes of an element.
        rows: samples of the tensor.

    Raises:
        WireError: the encoded bytes are not those of such a tensor.
        ValueError: the codec is unknown, or does not know such elements.
    """
    _check(codec, len(out), itemsize, rows)
    if codec in EXACT:
        exact.decode(fill, encoded_bytes, out, itemsize)
        return
    expected = len(out) if codec == NONE else lossy.encoded_bytes(codec, len(out), rows)
    if encoded_bytes != expected:
        raise WireError(f"{encoded_bytes} bytes of codec {codec} for {len(out)} raw ones, not {expected}")
    if codec == NONE:
        fill(out)
    else:
        lossy.decode(codec, fill, out, rows)


def decode_into(codec: str, encoded: Buffer, out: memoryview, itemsize: int, rows: int = 1) -> None:
    """Decode bytes that are there; arguments and errors as of :func:`decode`."""
    source = memoryview(encoded).cast("B")
    taken = 0

    def fill(part: memoryview) -> None:
        """Copy what comes next."""
        nonlocal taken
        if len(part) > len(source) - taken:
            raise WireError("encoded bytes: cut off")
        part[:] = source[taken : taken + len(part)]
        taken += len(part)

    decode(codec, fill, len(source), out, itemsize, rows)


def _check(codec: str, nbytes: int, itemsize: int, rows: int) -> None:
    if itemsize not in ITEM_BYTES or codec not in (NONE, *EXACT, *LOSSY):
        raise ValueError(f"codec {codec!r} for elements of {itemsize} bytes")
    if codec in LOSSY and (itemsize != 4 or rows < 1 or nbytes % (4 * rows)):
        raise ValueError(
            f"codec {codec!r} needs float32 elements of {rows} equal samples, not {nbytes} bytes"
        )
