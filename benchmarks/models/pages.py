"""The system's page cache: whether it holds files, and how to empty it of them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.testbed.processes import drop_pages
from hapi.arrays import Bytes
from hapi.errors import HapiError

MOST_RESIDENT = 0.01
"""Largest part of cold files that may still be in the page cache."""


def make_cold(paths: Iterable[Path]) -> float:
    """Write files back and drop their pages; return the part of them that the page cache holds nevertheless.

    Raises:
        HapiError: that part is too large to call the files cold.
    """
    files = list(paths)
    for path in files:
        _write_back(path)
        drop_pages(path)
    left = resident(files)
    if left > MOST_RESIDENT:
        raise HapiError(
            f"{left:.0%} of {files[0].parent} stays in the page cache: cold loads cannot be measured here"
        )
    return left


def make_warm(paths: Iterable[Path]) -> None:
    """Read files once."""
    buffer = memoryview(bytearray(8 << 20))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident(paths: Iterable[Path]) -> float:
    """Return the part of files that is in the page cache (``mincore``); 0 for no bytes."""
    pages = held = 0
    for path in paths:
        found = _resident_pages(path)
        held, pages = held + int(np.count_nonzero(found & 1)), pages + len(found)
    return held / pages if pages else 0.0


def _write_back(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _resident_pages(path: Path) -> Bytes:
    """For each page of a file a byte whose lowest bit says whether it is in memory."""
    size = path.stat().st_size
    if not size:
        return np.empty(0, np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    # A private mapping is writable for ctypes, which needs that to tell its address; the file stays as it is.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        try:
            if library.mincore(ctypes.addressof(first), size, flags):
                raise HapiError(f"{path}: mincore failed: {os.strerror(ctypes.get_errno())}")
        finally:
            del first
    return np.frombuffer(flags.raw, np.uint8)
