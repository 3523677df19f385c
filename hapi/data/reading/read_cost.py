"""Measured costs of reading from each kind of store, and the chunk sizes that follow."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.data.epoch_order import Shuffle
from hapi.store.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class ReadCost:
    """Costs of reading from a kind of store, and the sizes that follow from them."""

    request_seconds: float
    """Seconds of one range read among many, without its bytes."""
    bytes_per_second: float
    chunk_bytes: int
    """Bytes of a chunk, in the mean."""
    small_bytes: int
    """Up to this mean length a dataset is read in chunks."""
    piece_samples: int
    """Samples placed at a time: few enough that their chunks find slots, many enough for vectors to pay, and for the
    chunks that are missing to be worth asking for at once."""

    cache_bytes: int
    """Default bound of a chunk cache."""
    any_order: bool
    """True when samples that are read one by one come nearly as fast as in chunks: then the default order is
    any.
    """
    window: int
    """Chunks open at a time when the user names none: the default cache has room for twice as many, and for those that
    are open over the end of an epoch."""

    @property
    def slot_bytes(self) -> int:
        """Room for one chunk: samples of different lengths make some chunks longer than the mean."""
        return self.chunk_bytes + self.chunk_bytes // 4

    def default_shuffle(self, length: float) -> Shuffle:
        """Return the chunk windows for samples of ``length`` bytes in the mean."""
        return Shuffle(max(1, round(self.chunk_bytes / max(1.0, length))), self.window)

    def rent(self, length: float, chunk_bytes: float) -> float:
        """Return how many direct reads of samples of ``length`` bytes cost as much as one chunk of
        ``chunk_bytes``.
        """
        return (self.request_seconds + chunk_bytes / self.bytes_per_second) / (
            self.request_seconds + length / self.bytes_per_second
        )


LOCAL_COST = ReadCost(
    request_seconds=16e-6,
    bytes_per_second=1e9,
    chunk_bytes=256 << 10,
    small_bytes=32 << 10,
    piece_samples=4096,
    cache_bytes=64 << 20,
    any_order=True,
    window=64,
)
"""A virtual disk with cold page cache and ranges announced (``local.py``): 51,000 reads/s of 4 KB, 1 GB/s of 256 KB.
From 64 KB on, direct reads reach what chunks reach, and save the copy."""
REMOTE_COST = ReadCost(
    request_seconds=3e-3,
    bytes_per_second=5e8,
    chunk_bytes=8 << 20,
    small_bytes=2 << 20,
    piece_samples=32768,
    cache_bytes=360 << 20,
    any_order=False,
    window=10,
)
"""OpenStack Swift on loopback: 3 ms a request, 500 MB/s of large objects. With one core for all of its processes it
takes 18 ms for a request and 4.6 for each MB: ranges of 1 MB come at 30% of the rate of 16 MB, those of 4 MB at 74%,
those of 8 MB lie between."""


def read_cost(store: ObjectStore) -> ReadCost:
    """The costs of this kind of store."""
    return REMOTE_COST if store.local_path("any") is None else LOCAL_COST
