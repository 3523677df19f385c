"""Arrays in files, read piece by piece and never mapped: a mapped file that is shortened kills its readers."""

from __future__ import annotations

import math
import os
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hapi.errors import DataError
from hapi.store.safetensors import Array, decode_header, header_bytes


class StoredArray:
    """An array in C order in a file; the file stays open from the first read on. Thread-safe."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> None:
        """Describe an array in the file at ``path``, whose first byte is at ``start``."""
        self.dtype, self.shape, self.ndim = dtype, shape, len(shape)
        self._path, self._start = path, start

    @cached_property
    def _file(self) -> BinaryIO:
        return self._path.open("rb")  # closed with this object

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, number: int) -> Array:
        """Read part ``number`` along the first axis; :class:`DataError` when the file is too short."""
        shape = self.shape[1:]
        size = math.prod(shape) * self.dtype.itemsize
        return self._read(self._start + number * size, size).reshape(shape)

    def whole(self) -> Array:
        """Return the whole array in memory."""
        return self._read(self._start, math.prod(self.shape) * self.dtype.itemsize).reshape(self.shape)

    def _read(self, start: int, size: int) -> Array:
        data = np.empty(size, dtype=np.uint8)
        done = 0
        while done < size:
            try:
                count = os.preadv(self._file.fileno(), [data.data[done:]], start + done)
            except OSError as error:
                raise DataError(f"{self._path}: {error.strerror or error}") from error
            if count == 0:
                raise DataError(
                    f"{self._path} ends at byte {start + done}; it was shortened while it was read"
                )
            done += count
        return data.view(self.dtype)


def npy_array(path: Path) -> StoredArray | Array:
    """Return the array in a ``.npy`` file; in memory if it does not lie in C order. Raises numpy's errors."""
    mapped: Any = np.load(
        path, mmap_mode="r", allow_pickle=False
    )  # for its header; nothing of the map is looked at
    if mapped.ndim == 0 or not mapped.flags.c_contiguous or not isinstance(mapped, np.memmap):
        whole: Array = np.load(path, allow_pickle=False)
        return whole
    return StoredArray(path, mapped.dtype, mapped.shape, mapped.offset)


def safetensors_arrays(path: Path) -> dict[str, StoredArray]:
    """Return the arrays in a ``.safetensors`` file by name; :class:`DataError` when it is none."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        head += file.read(header_bytes(head, size, str(path)) - len(head))
    tensors, _ = decode_header(head, size, str(path))
    return {
        name: StoredArray(path, tensor.dtype, tensor.shape, tensor.start)
        for name, tensor in tensors.items()
        if tensor.shape
    }
