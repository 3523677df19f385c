"""Reads behind ``Dataset.read``: the bytes of many samples, as whole chunks through a cache or straight from
the store.

After DLFS's opportunistic batching (section III-D). A *chunk* is a run of consecutive sample ids inside one
shard, of about 256 KB on a disk (``chunk_layout.py``). Small samples whose chunk is cached are copied out of
it, thousands in a few numpy steps; others are read directly into the caller's buffer. Chunks are worth
reading in two cases:

- all, when the whole dataset fits into the cache, or when the caller knows that its order stays among few
  chunks;
- otherwise a chunk on which piecewise reads have spent the cost of the chunk (the rule for renting or buying:
  at most twice
  the cost with the future known). A full permutation over a dataset far larger than the cache comes back to a chunk too
  rarely, and buys next to none.

Checksums are per sample, and in chunks per run of samples (``chunk_checksums.py``), checked whenever a chunk
is read. Samples of runs that do not fit, or that lie in the chunk only partly, are checked one by one. A
chunk with a damaged sample is never cached, so its sound samples stay readable.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import Bytes, Flags, HashArray, IntArray
from hapi.data.chunk_checksums import Runs, digests
from hapi.data.epoch_order import MAX_GROUP, Shuffle, revisited_groups
from hapi.data.reading.chunk_cache import ABSENT, ChunkCache
from hapi.data.reading.chunk_layout import ByteRange, Grid, ShardLayout
from hapi.data.reading.read_cost import read_cost
from hapi.data.sample_directory import Located, Regular, SampleDirectory
from hapi.data.shards import ShardTable
from hapi.errors import DataError
from hapi.store.base import ObjectStore, ReadPart
from hapi.store.gather import ROWS_LIMIT, copy_ranges

_FORGOTTEN_AFTER = 4
"""Misses elsewhere, in cache sizes, after which the cost spent on a chunk is forgotten."""
_GRIDS = 4
"""Chunks of all other ways of cutting a dataset that are remembered, over those of the usual one."""
_FEW_CHUNKS = 1 << 20
"""Chunks that are remembered in any case; each takes 25 bytes."""
_SCATTERED = 2, 4
"""A read that touches more than these times the open chunks, and those that its samples fill, is not of its windows."""
_SMALLEST, _FULLEST = 16, 1.1
"""Chunks of a group's own size are at least 1/16 of the usual ones; larger than 1.1 times these, a group is several."""
_TWICE_WORTH = 256
"""Up to so many times the window's chunks, those over the end of the epoch are looked for: beyond, they are too few."""


@dataclass(frozen=True)
class AccessHint:
    """Hint to :class:`Reader` about the reads to come: they use few chunks at a time, each often enough."""

    group: int
    """Chunks of such groups are read whole at once."""
    revisited_groups: frozenset[int] = frozenset()
    """Groups that the epoch comes back to at its end: their chunks are kept where there is room."""
    sharers: int = 1
    """Such orders that load chunks meanwhile, this one included."""
    open_chunks: int = MAX_GROUP
    """Most chunks that a read uses beside those that its samples fill, as far as is known."""


Check = Callable[[IntArray, HashArray], None]
"""``check(ids, found)``; see :class:`Reader`."""


def chunk_cache(store: ObjectStore, budget: int | None = None) -> ChunkCache:
    """Return a chunk cache for datasets of ``store``; ``budget`` bytes, 0 for none, None for a suitable size."""
    cost = read_cost(store)
    return ChunkCache(cost.cache_bytes if budget is None else budget, cost.slot_bytes)


@dataclass(frozen=True)
class _SampleSlice:
    """Samples of one read: where they lie, and where in the caller's buffer they go. All arrays are [n]."""

    ids: IntArray
    shards: npt.NDArray[np.uint32]
    starts: IntArray
    lengths: IntArray
    out: IntArray

    def of(self, chosen: Flags | slice) -> _SampleSlice:
        return _SampleSlice(
            self.ids[chosen], self.shards[chosen], self.starts[chosen], self.lengths[chosen], self.out[chosen]
        )


@dataclass(frozen=True)
class _Wanted:
    """Chunks that a piece needs."""

    chunks: IntArray
    """Distinct, [chunks]"""
    which: IntArray
    """Each sample's place in ``chunks``; [n]"""
    worth: Flags
    """Chunks to be read whole if not cached; [chunks]"""


class Reader:
    """Reads samples of one dataset. Thread-safe; reads that want one chunk at a time load it once."""

    def __init__(
        self,
        store: ObjectStore,
        key_of: Callable[[int], str],
        shards: ShardTable,
        directory: SampleDirectory,
        check: Check,
        sums: HashArray,
        cache: ChunkCache,
    ) -> None:
        """Read the samples of one dataset.

        Args:
            store: where it lies.
            key_of: returns the key of a shard by its number.
            shards: table of the shards.
            directory: location of each sample.
            check: given ids and computed checksums; raises :class:`DataError` when one differs from the
                recorded one.
            sums: checksums of the runs, or none.
            cache: keeps chunks of small samples.
        """
        self._store, self._check, self._cache = store, check, cache
        self._key_of = key_of
        self.cost = cost = read_cost(store)
        self._runs = Runs(shards.size.astype(np.int64), shards.count, sums)
        self._layout = layout = ShardLayout(shards, directory, self._runs.samples)
        self._mean = max(1.0, shards.total_bytes / layout.count)
        self.default_shuffle = cost.default_shuffle(self._mean)
        """The chunk windows that suit the store; chunks have as many samples, unless a reader wants other ones."""
        self._grid = Grid(layout, self.default_shuffle.group)
        self.chunked = (
            self._mean <= cost.small_bytes and cache.slots > 0 and 2 * self._grid.total <= layout.count
        )
        """True when samples are small enough for chunks to pay; a chunk in a shard of one sample is that
        sample.
        """
        self.prefers_chunks = self.chunked and not cost.any_order
        """True when the default order is the chunk windows, since single samples come slowly."""
        if self.chunked:
            self._grid.allocate()
        self._chunks_kept = max(_FEW_CHUNKS, _GRIDS * self._grid.total)
        self._heads = _heads(cache, directory.regular)
        self._grids: OrderedDict[int, Grid] = OrderedDict()
        self._guard = threading.Lock()

    def read(
        self, ids: IntArray, located: Located, offsets: IntArray, out: Bytes, hint: AccessHint | None = None
    ) -> None:
        """Read sample ``ids[i]``, at ``located`` i, into ``out[offsets[i]:offsets[i + 1]]``; DataError if it
        is damaged.

        Args:
            ids: int64 [n].
            located: their locations.
            offsets: places in ``out``, int64 [n + 1].
            out: uint8.
            hint: for the reads to come.
        """
        whole = _SampleSlice(ids, located.shard, located.offset, located.length, offsets[:-1])
        size = self.cost.piece_samples
        slices = [whole.of(slice(low, low + size)) for low in range(0, len(ids), size)]
        if not self.chunked:
            for part in slices:
                self._direct(part, out)
            return
        grid = self._grid_of(hint.group) if hint else self._grid
        # One piece ahead, so that the disk fetches the next chunks while samples are copied out of these.
        ahead = deque(self._wanted(grid, part, hint) for part in slices[:1])
        for at, part in enumerate(slices):
            if at + 1 < len(slices):
                ahead.append(self._wanted(grid, slices[at + 1], hint))
            self._direct(self._from_chunks(grid, part, ahead.popleft(), hint, out), out)

    def access_hint(self, shuffle: Shuffle, seed: int, epoch: int, sharers: int = 1) -> AccessHint | None:
        """Return the hint for an epoch by ``shuffle``: whether chunks of its groups are read whole at once.

        They are if the cache has room for the windows twice over (open chunks, and those that open meanwhile).
        ``sharers`` such orders at a time have a part of the cache each; several get by with one and a half times
        their windows, as one needs little just when another needs much. The rest of a part keeps the chunks that are
        open over the epoch's end, which are else read twice.
        """
        count = self._layout.count
        group = min(shuffle.group, count)
        if not self.chunked or group * _SMALLEST * self._mean < self.cost.chunk_bytes:
            return None
        parts = self._parts(group)
        if -(-count // group) * parts > self._chunks_kept:
            return None
        part, open_chunks = self._cache.slots // sharers, shuffle.window * parts
        if 2 * part < (4 if sharers == 1 else 3) * open_chunks:
            return None
        few = -(-count // group) <= _TWICE_WORTH * shuffle.window
        max_revisited = max(0, part - 2 * open_chunks) // parts if few else 0
        revisited = revisited_groups(seed, epoch, count, Shuffle(group, shuffle.window), max_revisited)
        return AccessHint(group, revisited, sharers, open_chunks)

    def order_hint(self, order: npt.NDArray[Any]) -> AccessHint | None:
        """Return the hint for any order of ids: whether it uses a chunk often enough while the cache holds
        it.
        """
        group, slots = self.default_shuffle.group, self._cache.slots
        if not self.chunked or len(order) == 0:
            return None
        head = order[: slots * group // 2].astype(np.int64)
        chunks = np.unique(self._grid.chunks_of(head, self._layout.shards_of(head)))
        rent = self.cost.rent(self._mean, self.cost.chunk_bytes)
        return AccessHint(group) if len(chunks) <= slots and len(head) >= rent * len(chunks) else None

    def forgive(self) -> None:
        """Count damaged chunks as sound again: the shards were replaced by sound ones."""
        with self._guard:
            for grid in (self._grid, *self._grids.values()):
                grid.refused[:] = False

    def _parts(self, group: int) -> int:
        """Chunks of such a group, each of which fits a slot."""
        return -(
            -group // max(self.default_shuffle.group, int(_FULLEST * self.cost.chunk_bytes / self._mean))
        )

    def _grid_of(self, group: int) -> Grid:
        """The chunks of such groups, each as large as a slot of the cache allows."""
        if group == self.default_shuffle.group:
            return self._grid
        with self._guard:
            grid = self._grids.get(group)
            if grid is None:
                grid = self._grids[group] = Grid(self._layout, group, self._parts(group))
                grid.allocate()
            self._grids.move_to_end(group)
            while len(self._grids) > 1 and sum(g.total for g in self._grids.values()) > self._chunks_kept:
                self._cache.forget(self._grids.popitem(last=False)[1].area)
            return grid

    def _wanted(self, grid: Grid, part: _SampleSlice, hint: AccessHint | None) -> _Wanted:
        """The chunks of ``part``; the store is told of those that will be read."""
        chunks, which, counts = grid.distinct(grid.chunks_of(part.ids, part.shards))
        worth = self._worth(grid, chunks, counts, hint)
        missing = chunks[worth & (grid.area.slot_of[chunks] == ABSENT)]
        ranges = map(grid.byte_range, missing.tolist())
        self._store.announce([(self._key_of(s.shard), s.start, s.stop) for s in ranges])
        return _Wanted(chunks, which, worth)

    def _from_chunks(
        self, grid: Grid, part: _SampleSlice, wanted: _Wanted, hint: AccessHint | None, out: Bytes
    ) -> _SampleSlice:
        """Copy what lies in cached chunks, loading those that are worth it; what is left to be read directly."""
        chunks, which = wanted.chunks, wanted.which
        reservation = self._cache.reserve(grid.area, chunks, wanted.worth)
        try:
            self._load(grid, chunks[reservation.mine], reservation.slots[reservation.mine], hint)
            slots = self._cache.wait(reservation)
            begins = self._heads[slots] - grid.begins[chunks]
            held = (slots != ABSENT)[which]
            if held.all():
                inside, remaining = part, part.of(~held)
                starts = part.starts + begins[which]
            else:
                inside, remaining = part.of(held), part.of(~held)
                starts = inside.starts + begins[which[held]]
            copy_ranges(self._cache.data, starts, inside.lengths, out, inside.out)
        finally:
            self._cache.release(reservation)
        return remaining

    def _worth(self, grid: Grid, chunks: IntArray, counts: IntArray, hint: AccessHint | None) -> Flags:
        """Chunks, asked for ``counts`` samples each, that are worth reading whole if they are not cached."""
        sound = ~grid.refused[chunks]
        if grid.total <= self._cache.slots or (hint is not None and _fits_hint(grid, hint, counts)):
            return sound
        with self._guard:
            grid.misses += int((grid.area.slot_of[chunks] == ABSENT).sum())
            forgotten = grid.misses - grid.seen[chunks] > _FORGOTTEN_AFTER * self._cache.slots
            spent = np.where(forgotten, 0, grid.spent[chunks]) + counts
            grid.spent[chunks] = spent
            grid.seen[chunks] = grid.misses
        worth: Flags = sound & (spent >= self.cost.rent(self._mean, self.cost.chunk_bytes))
        return worth

    def _load(self, grid: Grid, chunks: IntArray, slots: IntArray, hint: AccessHint | None) -> None:
        """Fill and publish ``slots``. A chunk that is too long or damaged is refused from now on."""
        sound = np.zeros(len(chunks), dtype=np.bool_)
        try:
            ranges = [grid.byte_range(chunk) for chunk in chunks.tolist()]
            heads = self._heads[slots].tolist()
            # Before anything is read: when a part fails, those that came before it are published all the same.
            grid.begins[chunks] = [byte_range.start for byte_range in ranges]
            loads = [
                (at, byte_range, view[: byte_range.stop - byte_range.start])
                for at, (slot, head, byte_range) in enumerate(zip(slots.tolist(), heads, ranges, strict=True))
                if len(view := self._cache.slot(slot, head)) >= byte_range.stop - byte_range.start
            ]

            def check(number: int) -> None:
                at, byte_range, view = loads[number]
                sound[at] = self._is_sound(byte_range, view)

            self._store.read_many(
                [
                    ReadPart(self._key_of(byte_range.shard), byte_range.start, view)
                    for _, byte_range, view in loads
                ],
                check,
            )
            grid.refused[chunks] = ~sound
        finally:
            self._cache.publish(slots, sound)
        if hint is not None and hint.revisited_groups:
            revisited = np.array(
                [byte_range.first // hint.group in hint.revisited_groups for byte_range in ranges],
                dtype=np.bool_,
            )
            if revisited.any():
                self._cache.keep(slots[revisited & sound], hint.sharers * grid.total)

    def _is_sound(self, byte_range: ByteRange, view: memoryview) -> bool:
        low, high = byte_range.edges
        if self._runs.fit(byte_range.shard, byte_range.run, view, byte_range.starts, byte_range.stops):
            if byte_range.edges == (byte_range.first, byte_range.end):
                return True
            ids = np.concatenate((np.arange(byte_range.first, low), np.arange(high, byte_range.end)))
        else:
            ids = np.arange(byte_range.first, byte_range.end, dtype=np.int64)
        located = self._layout.directory.locate(ids)
        starts = located.offset - byte_range.start
        try:
            self._check(ids, digests(view, starts.tolist(), (starts + located.length).tolist()))
        except DataError:
            return False
        return True

    def _direct(self, part: _SampleSlice, out: Bytes) -> None:
        """Read samples straight into the caller's buffer, and check each as soon as it is there."""
        if len(part.ids) == 0:
            return
        view, digest_of = out.data, xxhash.xxh3_64_intdigest
        starts, stops = part.out.tolist(), (part.out + part.lengths).tolist()
        firsts = _first_of_neighbours(part)
        keys = {shard: self._key_of(shard) for shard in set(part.shards.tolist())}
        located = zip(part.shards[firsts].tolist(), part.starts[firsts].tolist(), strict=True)
        bounds = [*firsts.tolist(), len(starts)]
        parts = [
            ReadPart(keys[shard], begin, view[starts[first] : stops[end - 1]])
            for (shard, begin), (first, end) in zip(located, pairwise(bounds), strict=True)
        ]
        found = [0] * len(starts)

        def check(number: int) -> None:
            first, end = bounds[number], bounds[number + 1]
            if end == first + 1:
                found[first] = digest_of(parts[number].out)
            else:
                found[first:end] = [digest_of(view[starts[at] : stops[at]]) for at in range(first, end)]

        self._store.read_many(parts, check)
        self._check(part.ids, np.array(found, dtype=np.uint64))


def _heads(cache: ChunkCache, regular: Regular | None) -> IntArray:
    """First byte of the chunk of each slot in the cache; int64 [slots].

    Small samples of one length, side by side, are rows of one array there, which are gathered faster than
    unaligned bytes. A chunk finds room all the same, as slots are larger by more than that.
    """
    firsts = np.arange(cache.slots, dtype=np.int64) * cache.slot_bytes
    if regular is None or regular.length > ROWS_LIMIT:
        return firsts
    return -(-firsts // regular.length) * regular.length


def _fits_hint(grid: Grid, hint: AccessHint, counts: IntArray) -> bool:
    """Return whether what is read uses as few chunks as was said: who says more than he does must not have
    them all read.
    """
    of_open, of_filled = _SCATTERED
    return len(counts) <= of_open * hint.open_chunks + of_filled * (1 + int(counts.sum()) // grid.held)


def _first_of_neighbours(part: _SampleSlice) -> IntArray:
    """Samples that are neighbours both in the shard and in the buffer are one range: the first of each."""
    ends, stops = part.starts + part.lengths, part.out + part.lengths
    apart = (
        (part.shards[1:] != part.shards[:-1]) | (part.starts[1:] != ends[:-1]) | (part.out[1:] != stops[:-1])
    )
    return np.concatenate(([0], 1 + np.flatnonzero(apart)))
