"""Copies of many small pieces from one buffer into another, without a Python step for each.

A Python step costs about 0.2 microseconds, as much as copying 2 KB. Pieces of one length are copied as rows
of an array if their starts are multiples of it apart, otherwise by one gather over rows that begin at any
byte. Pieces of different lengths are copied twice by a power of two of bytes, from their start and up to
their end: two gathers and scatters for each power. Longer pieces are copied one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.arrays import Bytes, IntArray

_ROWS_BYTES = 128 << 10
"""Bytes gathered at a time: they are copied on from the processor's cache."""
ROWS_LIMIT = 16 << 10
"""Longest pieces, in bytes, that are gathered as rows of an array; for longer ones their alignment does not
matter.
"""
_EQUAL_LIMIT = 4 << 10
_MIXED_LIMIT = 1 << 10
"""Up to here a gather was faster (rows of an array; pieces of one length; the mean of different ones). Measured with
4096 pieces out of 64 MiB, nanoseconds each, gather beside Python's loop: 512 B 79 and 418, 4 KB 631 and 837, 16 KB
2107 and 1587; of different lengths 512 B 200 and 414, 1 KB 287 and 427, 2 KB 609 and 533. Rows of an array, 2 MiB at a
time, beside pieces anywhere and the loop: 64 B 42, 79, 503; 512 B 129, 143, 428; 784 B 179, 251, 514; 4 KB 613, 810,
973; 16 KB 2088, 2712, 2323; 32 KB 4099, 4956, 3809."""


def copy_ranges(source: Bytes, starts: IntArray, lengths: IntArray, out: Bytes, offsets: IntArray) -> None:
    """Copy ``source[starts[i]:starts[i] + lengths[i]]`` to ``out[offsets[i]:offsets[i] + lengths[i]]`` for
    every i.

    Args:
        source: uint8.
        starts: int64 [n].
        lengths: int64 [n].
        out: uint8; the pieces in it must not overlap.
        offsets: int64 [n].

    Raises:
        IndexError: a piece lies outside of its buffer.
    """
    if len(lengths) == 0:
        return
    _check(starts, lengths, len(source))
    _check(offsets, lengths, len(out))
    first, total = int(lengths[0]), int(lengths.sum())
    equal = first <= ROWS_LIMIT and bool((lengths == first).all())
    if equal and (first == 0 or _take_rows(source, starts, out, offsets, first)):
        return
    if equal and first <= _EQUAL_LIMIT:
        _copy_rows(source, starts, out, offsets, first)
    elif total <= _MIXED_LIMIT * len(lengths):
        _copy_mixed(source, starts, lengths, out, offsets)
    else:
        view, target = source.data, out.data
        for start, length, offset in zip(starts.tolist(), lengths.tolist(), offsets.tolist(), strict=True):
            target[offset : offset + length] = view[start : start + length]


def _take_rows(source: Bytes, starts: IntArray, out: Bytes, offsets: IntArray, length: int) -> bool:
    """Copy pieces that are rows of one array to places side by side; False where they are not."""
    if not _is_contiguous(offsets, length):
        return False
    origin, begin = int(starts[0]) % length, int(offsets[0])
    numbers = (starts - origin) // length
    if bool((numbers * length + origin != starts).any()):
        return False
    rows = source[origin : origin + (len(source) - origin) // length * length].reshape(-1, length)
    target = out[begin : begin + len(offsets) * length].reshape(-1, length)
    np.take(rows, numbers, axis=0, out=target, mode="clip")  # checked before; "raise" would copy twice
    return True


def _is_contiguous(offsets: IntArray, length: int) -> bool:
    return bool((offsets == int(offsets[0]) + np.arange(len(offsets), dtype=np.int64) * length).all())


def _copy_rows(source: Bytes, starts: IntArray, out: Bytes, offsets: IntArray, length: int) -> None:
    rows = _windows(source, length)
    block = max(1, _ROWS_BYTES // length)
    begin = int(offsets[0])
    if _is_contiguous(offsets, length):
        target = out[begin : begin + len(offsets) * length].view(rows.dtype)
        for low in range(0, len(offsets), block):
            target[low : low + block] = rows[starts[low : low + block]]
        return
    anywhere = _windows(out, length)
    for low in range(0, len(offsets), block):
        anywhere[offsets[low : low + block]] = rows[starts[low : low + block]]


def _copy_mixed(source: Bytes, starts: IntArray, lengths: IntArray, out: Bytes, offsets: IntArray) -> None:
    powers = np.frexp(lengths)[1]  # a length of 2**(p - 1) up to 2**p - 1 has power p; zero has 0
    for power in np.unique(powers[lengths > 0]).tolist():
        chosen = np.flatnonzero(powers == power)
        width = 1 << (power - 1)
        last = lengths[chosen] - width
        for shift in (np.int64(0), last):
            _copy_rows(source, starts[chosen] + shift, out, offsets[chosen] + shift, width)


def _windows(buffer: Bytes, length: int) -> npt.NDArray[Any]:
    """Element i is ``buffer[i:i + length]`` as one item; a view."""
    return np.ndarray((len(buffer) - length + 1,), dtype=f"V{length}", buffer=buffer, strides=(1,))


def _check(starts: IntArray, lengths: IntArray, size: int) -> None:
    """Check all bounds before anything is copied: a negative start would be a window counted from the end."""
    if int(starts.min()) < 0 or int((starts + lengths).max()) > size or int(lengths.min()) < 0:
        raise IndexError("a piece lies outside of its buffer")
