"""Lossy codecs of float32 elements: fp16, bf16, and 8 bit with a scale a sample.

All round to the nearest value, to the even one of two. A sample's values depend on that sample alone. Encoded bytes are
the elements in order; those of ``int8`` come after the samples' scales (float32).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hapi.codecs.exact import Buffer, Fill
from hapi.errors import UnprocessableError, WireError

Floats = npt.NDArray[np.float32]
PIECE = 1 << 18
"""Elements that are converted at a time."""
_LEVELS = 127
"""Largest value of 8 bit; -128 is not used."""
ITEM_BYTES = {"fp16": 2, "bf16": 2, "int8": 1}
"""Encoded bytes of an element."""
_WIRE_TYPE = {"fp16": "<f2", "bf16": "<u2", "int8": "<i1"}


def encoded_bytes(codec: str, nbytes: int, rows: int) -> int:
    """Return the encoded length of ``nbytes`` of float32 elements in ``rows`` samples."""
    scales = 4 * rows if codec == "int8" else 0
    return nbytes // 4 * ITEM_BYTES[codec] + scales


def encode(codec: str, data: Buffer, rows: int) -> list[Buffer]:
    """Return ``data`` in fewer bytes.

    Args:
        codec: one of :data:`hapi.codecs.names.LOSSY`.
        data: float32 elements of ``rows`` samples of equal length.
        rows: number of samples.

    Raises:
        UnprocessableError: a finite value is too large for the codec.
    """
    values = np.frombuffer(data, dtype="<f4")
    found: list[Buffer] = []
    scales = _scales(values, rows) if codec == "int8" else None
    if scales is not None:
        found.append(scales.view(np.uint8).data)
    for start, length, scale in _pieces(len(values), rows, scales):
        found.append(_encoded(codec, values[start : start + length], scale).view(np.uint8).data)
    return found


def decode(codec: str, fill: Fill, out: memoryview, rows: int) -> None:
    """Decode into ``out``, piece by piece.

    Args:
        codec: one of :data:`hapi.codecs.names.LOSSY`.
        fill: gives the encoded bytes, :func:`encoded_bytes` of them.
        out: float32 elements of ``rows`` samples go here; writable.
        rows: number of samples.

    Raises:
        WireError: a scale is negative.
    """
    values = np.frombuffer(out, dtype="<f4")
    scales: Floats | None = None
    if codec == "int8":
        scales = np.empty(rows, dtype="<f4")
        fill(scales.view(np.uint8).data)
        if (scales < 0).any():
            raise WireError("encoded features: a negative scale")
    piece = np.empty(min(PIECE, len(values)), dtype=_WIRE_TYPE[codec])
    for start, length, scale in _pieces(len(values), rows, scales):
        part, into = piece[:length], values[start : start + length]
        fill(part.view(np.uint8).data)
        if codec == "bf16":
            into.view("<u4")[:] = part.astype("<u4") << 16
        elif codec == "fp16":
            into[:] = part
        else:
            with np.errstate(invalid="ignore"):  # of samples that have no scale
                np.multiply(part, np.float32(scale), out=into)


def _pieces(count: int, rows: int, scales: Floats | None) -> Iterator[tuple[int, int, float]]:
    """Start, length and scale of what is converted at a time: parts of samples where they have scales."""
    width = count // rows if scales is not None and rows else count
    for row in range(rows if scales is not None and width else 1):
        scale = 1.0 if scales is None or not len(scales) else float(scales[row])
        for start in range(0, width, PIECE):
            yield row * width + start, min(PIECE, width - start), scale


def _scales(values: Floats, rows: int) -> Floats:
    """Size of a step of each sample; no number where a value is infinite or none."""
    if not values.size:
        return np.zeros(rows, dtype="<f4")
    table = values.reshape(rows, -1)
    largest = np.maximum(table.max(axis=1), -table.min(axis=1)).astype(np.float64)
    largest[~np.isfinite(largest)] = np.nan
    scales: Floats = (largest / _LEVELS).astype("<f4")
    return scales


def _encoded(codec: str, values: Floats, scale: float) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if codec == "int8":
            steps = np.rint(values / np.float32(scale)) if scale else np.zeros_like(values)
            return np.nan_to_num(np.clip(steps, -_LEVELS, _LEVELS), copy=False).astype(np.int8)
        found: npt.NDArray[np.generic] = values.astype("<f2") if codec == "fp16" else _bf16(values)
        too_large = _infinite(codec, found) & np.isfinite(values)
    if too_large.any():
        largest = float(np.abs(values[too_large]).max())
        raise UnprocessableError(
            f"a feature of {largest:g} does not fit the codec {codec}; choose another one (--wire-codec)"
        )
    return found


def _bf16(values: Floats) -> npt.NDArray[np.uint16]:
    words = values.view("<u4")
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    quiet = (words >> 16) | 0x40  # rounding could turn what is no number into an infinity
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


def _infinite(codec: str, found: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    exponent = 0x7F80 if codec == "bf16" else 0x7C00
    infinite: npt.NDArray[np.bool_] = (found.view("<u2") & 0x7FFF) == exponent
    return infinite
