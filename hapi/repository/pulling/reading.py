"""Bytes of many stored tensors in the order of a file: read ahead, verified, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from hapi.errors import NotFoundError, StoreError, StoreUnavailableError
from hapi.models.tensors import tensor_bytes
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import TensorEntry
from hapi.repository.pulling.selection import FileTensor
from hapi.repository.stored import StoredModel
from hapi.store.base import ReadPart

WINDOW_BYTES = 32 << 20
"""Bytes that are asked for at once; two windows are in memory."""


@dataclass(frozen=True)
class _Stretch:
    """Bytes ``start..stop`` (stop excluded) of a tensor."""

    tensor: FileTensor
    start: int
    stop: int


def read_in_order(stored: StoredModel, tensors: Sequence[FileTensor]) -> Iterator[memoryview]:
    """Yield the bytes of all ``tensors`` one after another; each piece is valid until the next one is asked for.

    While a window is used, the next one is read.

    Raises:
        DataError: a tensor is damaged in the store; its bytes may have been yielded.
    """
    windows = list(_windows(tensors))
    nbytes = min(WINDOW_BYTES, sum(tensor.nbytes for tensor in tensors))
    buffers = [memoryview(bytearray(nbytes)) for _ in range(2)]
    checksum = TensorChecksum()
    with ThreadPoolExecutor(1, thread_name_prefix="hapi-pull") as reader:
        reads = (reader.submit(_read, stored, w, buffers[n % 2]) for n, w in enumerate(windows))
        coming = list(islice(reads, 1))
        for window in windows:
            found = coming.pop().result()
            coming += islice(reads, 1)
            for stretch, data in zip(window, found, strict=True):
                entry = stretch.tensor.entry
                if entry is not None:
                    checksum.update(data)
                    if stretch.stop == entry.nbytes:
                        if checksum.hexdigest() != entry.checksum:
                            raise stored.damaged(entry)
                        checksum = TensorChecksum()
                yield data


def _windows(tensors: Sequence[FileTensor]) -> Iterator[list[_Stretch]]:
    window: list[_Stretch] = []
    room = WINDOW_BYTES
    for tensor in tensors:
        start = 0
        while start < tensor.nbytes:
            stop = min(tensor.nbytes, start + room)
            window.append(_Stretch(tensor, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window


def _read(stored: StoredModel, window: Sequence[_Stretch], buffer: memoryview) -> list[memoryview]:
    """The bytes of each stretch, in ``buffer``."""
    found, parts, entries, position = [], [], list[TensorEntry](), 0
    for stretch in window:
        out = buffer[position : position + stretch.stop - stretch.start]
        position += len(out)
        entry = stretch.tensor.entry
        if entry is not None:
            parts.append(ReadPart(entry.pack, entry.start + stretch.start, out))
            entries.append(entry)
        elif stretch.tensor.value is not None:
            out[:] = tensor_bytes(stretch.tensor.value)[stretch.start : stretch.stop]
        found.append(out)
    try:
        stored.store.read_many(parts)
    except StoreUnavailableError:
        raise
    except (NotFoundError, StoreError):  # packed anew since, or shortened: one by one, which says so
        for entry, part in zip(entries, parts, strict=True):
            stored.read_part(entry.name, part.start - entry.start, part.out)
    return found
