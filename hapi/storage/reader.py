"""Below ``Dataset.read``: the bytes of many samples, as whole chunks through a cache or straight from the store.

After DLFS's opportunistic batching (section III-D). A *chunk* is a run of consecutive sample ids inside one shard, of
about 256 KB on a disk. Small samples whose chunk is cached are copied out of it, thousands in a few numpy steps;
others are read directly into the caller's buffer. Which chunks are worth reading:

- all, when the whole data set fits into the cache, or when the caller knows that its order stays among few chunks;
- else a chunk on which piecewise reads have spent what the chunk would have cost (the rule for renting or buying: at
  most twice the cost of who knows the future). A full permutation over a data set far larger than the cache comes
  back to a chunk too rarely, and buys next to none.

Checksums are per sample. A chunk's samples are checked when it is first read, and the checksum of the whole is
remembered for later reads of it. A chunk with a damaged sample is never cached, so its sound samples stay readable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.errors import DataError
from hapi.storage.chunks import ABSENT, Area, ChunkCache, Flags
from hapi.storage.directory import Located, offsets_of
from hapi.storage.gather import Bytes, copy_pieces
from hapi.storage.objects import ObjectStore, ReadPart
from hapi.storage.sequence import IntArray

PIECE_SAMPLES = 4096
"""Samples placed at a time: few enough that their chunks find slots, many enough for vectors to pay."""
_FORGOTTEN_AFTER = 4
"""What was spent on a chunk is forgotten after this many times the cache's slots were missed elsewhere."""
CACHE_BYTES = 64 << 20
"""Default bound of a chunk cache: about 200 chunks on a disk, three windows of 64."""


Check = Callable[[IntArray, Bytes, IntArray, IntArray], None]
"""``check(ids, buffer, starts, stops)``; see :class:`Reader`."""


@dataclass(frozen=True, kw_only=True)
class ReadCost:
    """What reading from a kind of store costs, and what follows from it."""

    request_seconds: float
    """Of one range read among many, without its bytes."""
    bytes_per_second: float
    chunk_bytes: int
    """Bytes of a chunk, in the mean."""
    small_bytes: int
    """Up to this mean length a data set is read in chunks."""

    @property
    def slot_bytes(self) -> int:
        """Room for one chunk: samples of different lengths make some chunks longer than the mean."""
        return self.chunk_bytes + self.chunk_bytes // 4

    def rent(self, length: float) -> float:
        """Samples of ``length`` bytes whose direct reads cost as much as one chunk."""
        return (self.request_seconds + self.chunk_bytes / self.bytes_per_second) / (
            self.request_seconds + length / self.bytes_per_second
        )


LOCAL_COST = ReadCost(
    request_seconds=16e-6, bytes_per_second=1e9, chunk_bytes=256 << 10, small_bytes=32 << 10
)
"""A virtual disk with cold page cache and ranges announced (``local.py``): 51,000 reads/s of 4 KB, 1 GB/s of 256 KB.
From 64 KB on, direct reads reach what chunks reach, and save the copy."""
REMOTE_COST = ReadCost(request_seconds=3e-3, bytes_per_second=5e8, chunk_bytes=1 << 20, small_bytes=256 << 10)
"""OpenStack Swift on loopback: 3 ms a request, 500 MB/s of large objects."""


def read_cost(store: ObjectStore) -> ReadCost:
    """The costs of this kind of store."""
    return REMOTE_COST if store.local_path("any") is None else LOCAL_COST


def chunk_cache(store: ObjectStore, budget: int = CACHE_BYTES) -> ChunkCache:
    """A chunk cache of at most ``budget`` bytes for data sets of ``store``; 0 for none."""
    return ChunkCache(budget, read_cost(store).slot_bytes)


@dataclass(frozen=True)
class _Piece:
    """Samples of one read: where they lie, and where in the caller's buffer they go. All arrays are [n]."""

    ids: IntArray
    shards: npt.NDArray[np.uint32]
    starts: IntArray
    lengths: IntArray
    out: IntArray

    def of(self, chosen: Flags) -> _Piece:
        return _Piece(
            self.ids[chosen], self.shards[chosen], self.starts[chosen], self.lengths[chosen], self.out[chosen]
        )


class Reader:
    """Reads samples of one data set. Thread-safe; reads that want one chunk at a time load it once."""

    def __init__(
        self,
        store: ObjectStore,
        key_of: Callable[[int], str],
        firsts: IntArray,
        total_bytes: int,
        locate: Callable[[IntArray], Located],
        check: Check,
        cache: ChunkCache,
    ) -> None:
        """``key_of(shard)``: its object; it has the samples ``firsts[shard]..firsts[shard + 1]``.

        ``locate(ids)`` tells where samples lie; ``check(ids, buffer, starts, stops)`` raises :class:`DataError` when
        one of them is not ``buffer[starts[i]:stops[i]]``.
        """
        self._store, self._locate, self._check, self._cache = store, locate, check, cache
        self._key_of, self._firsts = key_of, firsts
        counts = firsts[1:] - firsts[:-1]
        cost, mean = read_cost(store), max(1.0, total_bytes / int(self._firsts[-1]))
        self._run = max(1, int(cost.chunk_bytes / mean))
        self._rent = cost.rent(mean)
        self._bases = offsets_of(-(-counts // self._run))
        several = 2 * int(self._bases[-1]) <= int(firsts[-1])
        self.chunked = mean <= cost.small_bytes and cache.slots > 0 and several
        """Whether samples are small enough for chunks to pay; a chunk in a shard of one sample is that sample."""
        total = int(self._bases[-1]) if self.chunked else 0
        self._area = Area(total)
        self._fits = total <= cache.slots
        self._begins = np.zeros(total, dtype=np.int64)
        self._sums = np.zeros(total, dtype=np.uint64)
        self._refused = np.zeros(total, dtype=np.bool_)
        self._spent = np.zeros(total, dtype=np.float32)
        self._seen = np.zeros(total, dtype=np.int64)
        self._misses = 0
        self._guard = threading.Lock()

    def read(self, ids: IntArray, places: Located, offsets: IntArray, out: Bytes, near: bool = False) -> None:
        """Sample ``ids[i]``, which lies at ``places`` i, into ``out[offsets[i]:offsets[i + 1]]``, checked.

        ``near`` says that the reads to come stay among the same chunks (:meth:`is_near`). Raises what the store
        raises, and :class:`DataError` for a damaged sample.
        """
        for low in range(0, len(ids), PIECE_SAMPLES):
            part = slice(low, min(low + PIECE_SAMPLES, len(ids)))
            piece = _Piece(
                ids[part], places.shard[part], places.offset[part], places.length[part], offsets[:-1][part]
            )
            self._direct(self._from_chunks(piece, out, near) if self.chunked else piece, out)

    def is_near(self, order: IntArray) -> bool:
        """Whether ``order`` uses a chunk, while the cache holds it, often enough for it to be read whole at once."""
        if not self.chunked or len(order) == 0:
            return False
        span = order[: self._cache.slots * self._run // 2]
        shards = np.searchsorted(self._firsts, span, side="right") - 1
        chunks = np.unique(self._chunks(span, shards))
        return len(chunks) <= self._cache.slots and len(span) >= self._rent * len(chunks)

    def _chunks(self, ids: IntArray, shards: npt.NDArray[Any]) -> IntArray:
        found: IntArray = self._bases[shards] + (ids - self._firsts[shards]) // self._run
        return found

    def _from_chunks(self, piece: _Piece, out: Bytes, near: bool) -> _Piece:
        """Copy what lies in cached chunks, loading those that are worth it; what is left to be read directly."""
        chunks, which, counts = np.unique(
            self._chunks(piece.ids, piece.shards), return_inverse=True, return_counts=True
        )
        claim = self._cache.claim(self._area, chunks, self._worth(chunks, counts, near))
        try:
            self._load(chunks[claim.mine], claim.slots[claim.mine])
            slots = self._cache.wait(claim)
            begins = slots * self._cache.slot_bytes - self._begins[chunks]
            held = (slots != ABSENT)[which]
            if held.all():
                inside, rest = piece, piece.of(~held)
                starts = piece.starts + begins[which]
            else:
                inside, rest = piece.of(held), piece.of(~held)
                starts = inside.starts + begins[which[held]]
            copy_pieces(self._cache.data, starts, inside.lengths, out, inside.out)
        finally:
            self._cache.release(claim)
        return rest

    def _worth(self, chunks: IntArray, counts: IntArray, near: bool) -> Flags:
        """Which of these chunks, asked for ``counts`` samples each, are to be read whole if they are not cached."""
        sound = ~self._refused[chunks]
        if near or self._fits:
            return sound
        with self._guard:
            self._misses += int((self._area.slot_of[chunks] == ABSENT).sum())
            forgotten = self._misses - self._seen[chunks] > _FORGOTTEN_AFTER * self._cache.slots
            spent = np.where(forgotten, 0, self._spent[chunks]) + counts
            self._spent[chunks] = spent
            self._seen[chunks] = self._misses
        worth: Flags = sound & (spent >= self._rent)
        return worth

    def _load(self, chunks: IntArray, slots: IntArray) -> None:
        """Fill and publish ``slots``. A chunk that is too long or damaged is refused from now on."""
        sound = np.zeros(len(chunks), dtype=np.bool_)
        try:
            spans = [self._span(chunk) for chunk in chunks.tolist()]
            fits = [span.stop - span.start <= self._cache.slot_bytes for span in spans]
            buffers = [
                self._cache.slot(slot)[: s.stop - s.start]
                for slot, s in zip(slots.tolist(), spans, strict=True)
            ]
            self._store.read_many(
                [
                    ReadPart(self._key_of(span.shard), span.start, buffer)
                    for span, buffer, fit in zip(spans, buffers, fits, strict=True)
                    if fit
                ]
            )
            for at, (span, buffer) in enumerate(zip(spans, buffers, strict=True)):
                sound[at] = fits[at] and self._is_sound(span, buffer)
                self._begins[span.chunk] = span.start
                self._refused[span.chunk] = not sound[at]
        finally:
            self._cache.publish(slots, sound)

    def _span(self, chunk: int) -> _Span:
        shard = int(np.searchsorted(self._bases, chunk, side="right")) - 1
        first = int(self._firsts[shard]) + (chunk - int(self._bases[shard])) * self._run
        ids = np.arange(first, min(first + self._run, int(self._firsts[shard + 1])), dtype=np.int64)
        places = self._locate(ids)
        stops = places.offset + places.length
        return _Span(chunk, shard, int(places.offset.min()), int(stops.max()), ids, places.offset, stops)

    def _is_sound(self, span: _Span, buffer: memoryview) -> bool:
        known = int(self._sums[span.chunk])
        found = xxhash.xxh3_64_intdigest(buffer)
        if known:
            return found == known
        try:
            self._check(
                span.ids, np.frombuffer(buffer, np.uint8), span.starts - span.start, span.stops - span.start
            )
        except DataError:
            return False
        self._sums[span.chunk] = found
        return True

    def _direct(self, piece: _Piece, out: Bytes) -> None:
        """Read and check samples straight in the caller's buffer."""
        if len(piece.ids) == 0:
            return
        self._store.read_many(list(self._parts(piece, out.data)))
        self._check(piece.ids, out, piece.out, piece.out + piece.lengths)

    def _parts(self, piece: _Piece, out: memoryview) -> Iterator[ReadPart]:
        """Ranges to read: samples that are neighbours both in the shard and in the buffer are one."""
        ends, stops = piece.starts + piece.lengths, piece.out + piece.lengths
        breaks = 1 + np.flatnonzero(
            (piece.shards[1:] != piece.shards[:-1])
            | (piece.starts[1:] != ends[:-1])
            | (piece.out[1:] != stops[:-1])
        )
        firsts = np.concatenate(([0], breaks))
        lasts = np.concatenate((breaks, [len(ends)])) - 1
        for shard, start, low, high in zip(
            piece.shards[firsts].tolist(),
            piece.starts[firsts].tolist(),
            piece.out[firsts].tolist(),
            stops[lasts].tolist(),
            strict=True,
        ):
            if high > low:
                yield ReadPart(self._key_of(shard), start, out[low:high])


@dataclass(frozen=True)
class _Span:
    """A chunk in its shard: bytes ``start..stop``, and its samples with theirs."""

    chunk: int
    shard: int
    start: int
    stop: int
    ids: IntArray
    starts: IntArray
    stops: IntArray
