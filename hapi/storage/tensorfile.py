"""Safetensors files of plain numpy arrays, written as one buffer and read without a copy.

The library reads and writes these files too (a test checks it); here they are views of a memory map or of
one buffer, so that an index of 10 million samples costs no copy. Format: 8 bytes header length (little
endian), JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.errors import DataError, StoreError
from hapi.storage.objects import ObjectStore

Array = npt.NDArray[Any]

_DTYPES = {
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20


def encode_tensors(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> memoryview:
    """A safetensors file holding ``tensors``, the widest types first so that every one is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in ordered:
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = np.empty(8 + len(text) + offset, dtype=np.uint8)
    out[:8] = np.frombuffer(len(text).to_bytes(8, "little"), dtype=np.uint8)
    out[8 : 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)
    position = 8 + len(text)
    for _, array in ordered:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[position : position + array.nbytes] = flat
        position += array.nbytes
    return out.data


def decode_tensors(buffer: Array, what: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Views of the tensors in ``buffer`` (uint8, a whole file), and metadata; DataError naming ``what``."""
    try:
        length = int.from_bytes(buffer[:8].tobytes(), "little")
        if len(buffer) < 8 or length > min(MAX_HEADER_BYTES, len(buffer) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(buffer[8 : 8 + length].tobytes())
        metadata = header.pop("__metadata__", {})
        body = buffer[8 + length :]
        tensors = {str(name): _view(body, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{what} is no safetensors file that can be read here: {_reason(error)}") from error
    if not isinstance(metadata, dict):
        raise DataError(f"{what}: its metadata is no table")
    return tensors, {str(k): str(v) for k, v in metadata.items()}


def _view(body: Array, entry: Mapping[str, Any]) -> Array:
    name = str(entry["dtype"])
    if name not in _DTYPES:
        raise ValueError(f"element type {name} is not supported")
    dtype = np.dtype(_DTYPES[name])
    shape = tuple(int(side) for side in entry["shape"])
    start, stop = (int(v) for v in entry["data_offsets"])
    if any(side < 0 for side in shape) or not 0 <= start <= stop <= len(body):
        raise ValueError("a tensor lies outside of the file")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's size does not fit its shape")
    return body[start:stop].view(dtype).reshape(shape)


def _reason(error: BaseException) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)[:200]


def map_file(path: Path) -> Array:
    """The bytes of a local file as a read-only memory map, uint8."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def read_object(store: ObjectStore, key: str) -> Array:
    """All bytes of an object, uint8: mapped when the store is local, else read once."""
    size = store.size(key)
    path = store.local_path(key)
    if path is not None:
        try:
            return map_file(path)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from error
    buffer = np.empty(size, dtype=np.uint8)
    store.read_into(key, 0, buffer.data)
    return buffer
