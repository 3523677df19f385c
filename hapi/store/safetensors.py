"""Safetensors files of plain numpy arrays, written as one buffer and read as views of one.

The library reads and writes these files too (a test checks it). Format: 8 bytes header length (little
endian), JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.errors import DataError
from hapi.wire.documents import parse_document

Array = npt.NDArray[Any]

_DTYPES = {
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20
_MAX_DIMENSIONS = 16


def encode_tensors(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> memoryview:
    """Return a safetensors file of ``tensors``, the widest types first so that each is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    entries = [(name, _NAMES[array.dtype], array.shape, array.nbytes) for name, array in ordered]
    head = encode_header(entries, metadata)
    out = np.empty(len(head) + sum(array.nbytes for _, array in ordered), dtype=np.uint8)
    out[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    position = len(head)
    for _, array in ordered:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[position : position + array.nbytes] = flat
        position += array.nbytes
    return out.data


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> bytes:
    """The length field and header of a file whose tensors follow one another in this order.

    Args:
        tensors: For each its name, its type as the format calls it ("F32"), its shape, and its bytes.
        metadata: Texts to be kept beside them.
        alignment: The first tensor begins at a multiple of these bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class TensorRange:
    """Location and form of one tensor in a file: bytes ``start..stop`` (stop excluded)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, data: Array) -> Array:
        """Return the tensor in its bytes (uint8), a view."""
        return data.view(self.dtype).reshape(self.shape)


def header_bytes(head: bytes, size: int, what: str) -> int:
    """Return the bytes of a file's length field and header.

    Args:
        head: the file's first 8 bytes.
        size: bytes of the whole file.
        what: the file, for messages.

    Raises:
        DataError: the file has no room for its header.
    """
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(MAX_HEADER_BYTES, size):
        is_short = len(head) < 8 or length > size
        why = "is longer than the file" if is_short else f"has {length} bytes, more than {MAX_HEADER_BYTES}"
        raise DataError(f"{what} is no safetensors file that can be read here: its header {why}")
    return length


def decode_header(head: bytes, size: int, what: str) -> tuple[dict[str, TensorRange], dict[str, str]]:
    """Return the locations of the tensors in a file, and its metadata.

    Args:
        head: the file's first bytes, as many as :func:`header_bytes` says.
        size: bytes of the whole file.
        what: the file, for messages.

    Raises:
        DataError: the header is malformed.
    """
    try:
        header = parse_document(head[8:])
        metadata = header.pop("__metadata__", {})
        tensors = {str(name): _tensor_range(entry, len(head), size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{what} is no safetensors file that can be read here: {_reason(error)}") from error
    if not isinstance(metadata, dict):
        raise DataError(f"{what}: its metadata is no table")
    return tensors, {str(k): str(v) for k, v in metadata.items()}


def decode_tensors(buffer: Array, what: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Return views of the tensors in ``buffer`` (uint8, a whole file), and metadata; DataError naming
    ``what``.
    """
    length = header_bytes(buffer[:8].tobytes(), len(buffer), what)
    tensors, metadata = decode_header(buffer[:length].tobytes(), len(buffer), what)
    return {name: tensor.of(buffer[tensor.start : tensor.stop]) for name, tensor in tensors.items()}, metadata


def _tensor_range(entry: Mapping[str, Any], first: int, size: int) -> TensorRange:
    """The place that ``entry`` of a header tells, in a file of ``size`` bytes whose tensors begin at ``first``."""
    name = entry["dtype"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"element type {name!r:.40} is not supported")
    dtype = np.dtype(_DTYPES[name])
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor's shape is no list of sides")
    if any(type(number) is not int or not 0 <= number <= size for number in (*shape, start, stop)):
        raise ValueError("a tensor lies outside of the file")
    if not start <= stop <= size - first:
        raise ValueError("a tensor lies outside of the file")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's size does not fit its shape")
    return TensorRange(dtype, tuple(shape), first + start, first + stop)


def _reason(error: BaseException) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)[:200]
