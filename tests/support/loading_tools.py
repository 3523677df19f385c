"""Packs of known tensors, and stores that say what is read from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from hapi.models.graph.digest import content_digest
from hapi.models.tensors import tensor_bytes
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import TensorEntry
from hapi.store.base import ObjectStore, ReadPart, Then, nothing

Named = Sequence[tuple[str, torch.Tensor]]


def write_pack(
    store: ObjectStore, tensors: Named, key: str = "packs/one", *, head: int = 64, gap: int = 0
) -> list[TensorEntry]:
    """Write ``tensors`` one after another, ``gap`` bytes between them, and return where they are."""
    data, entries = _pack_of(tensors, key, head, gap)
    store.put(key, memoryview(data))
    return entries


def write_large(store: ObjectStore, count: int, elements: int) -> tuple[Named, list[TensorEntry]]:
    """Write a pack of ``count`` long tensors, which is made once for the tests that follow each other; they are named
    by their numbers.
    """
    tensors, data, entries = _large(count, elements)
    store.put("packs/one", memoryview(data))
    return tensors, entries


@lru_cache(maxsize=1)
def _large(count: int, elements: int) -> tuple[Named, bytearray, list[TensorEntry]]:
    """Digests of long tensors take most of the time of a test of their loading."""
    ranges = [torch.arange(first, first + elements, dtype=torch.int32) for first in range(count)]
    tensors = [(str(number), values.view(torch.float32)) for number, values in enumerate(ranges)]
    return tensors, *_pack_of(tensors, "packs/one", 64, 0)


def _pack_of(tensors: Named, key: str, head: int, gap: int) -> tuple[bytearray, list[TensorEntry]]:
    out = bytearray(head)
    entries = []
    for name, tensor in tensors:
        data = tensor_bytes(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        checksum = TensorChecksum(data).hexdigest()
        entries.append(
            TensorEntry(name, dtype, tuple(tensor.shape), content_digest(data), checksum, key, len(out))
        )
        out += bytes(data) + bytes(gap)
    return out, entries


def some_tensors(count: int, seed: int = 0, most: int = 40_000) -> Named:
    """``count`` tensors of different sizes and content."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most, (count,), generator=random).tolist()
    return [(f"layer.{n}.weight", torch.randn(size, generator=random)) for n, size in enumerate(sizes)]


def flip(store: ObjectStore, entry: TensorEntry, at: int = -1) -> None:
    """Change one bit of a stored tensor, of its last byte unless another is named."""
    data = bytearray(store.get(entry.pack, 1 << 30))
    data[(entry.start if at >= 0 else entry.stop) + at] ^= 1
    store.put(entry.pack, data)


class WatchedSource:
    """A store that is read part by part, and what is done before each; it may be no store of hapi's."""

    def __init__(self, store: ObjectStore, before: Callable[[ReadPart], Any] = lambda part: None) -> None:
        self.store = store
        self.url = store.url
        self.before = before
        self.nbytes = 0
        self.readers: set[int] = set()
        self._lock = threading.Lock()

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        for number, part in enumerate(parts):
            self.before(part)
            self.store.read_into(part.key, part.start, part.out)
            with self._lock:
                self.nbytes += len(part.out)
                self.readers.add(threading.get_ident())
            then(number)


def loading_threads() -> list[str]:
    """Names of the readers that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hapi-loading")]
