"""Division of a dataset's samples into chunks, and the location of each.

Chunks are cut where groups of a shuffle begin (every ``group`` ids), so that a group is read together, and
where shards begin, as a chunk is one range of one object. A group that is larger than the longest chunk is
several chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.data.reading.chunk_cache import Area
from hapi.data.sample_directory import SampleDirectory
from hapi.data.shards import ShardTable

_COUNTED = 1 << 16
"""Up to so many chunks they are counted, which takes a tenth of sorting a few thousand; more would take memory."""
_KEPT = 1 << 16
"""Runs of the spans remembered: a chunk is announced before it is read, and read in every epoch."""
_AS_RUNS = 12
"""A span takes as much memory as so many runs, beside its own."""
_UNKNOWN, _IN_ORDER, _ANYHOW = 0, 1, 2


@dataclass(frozen=True)
class ByteRange:
    """A chunk in its shard: bytes ``start..stop``, samples ``first..end`` (end excluded)."""

    shard: int
    start: int
    stop: int
    first: int
    end: int
    run: int
    """The first of the shard's runs that lie in it as a whole."""
    edges: tuple[int, int]
    """The samples of these runs; those of the chunk before and after them are in runs that lie in it partly."""
    starts: list[int]
    stops: list[int]
    """Bytes of each of these runs, from the chunk's start. No arrays: a chunk of 256 KB is four runs."""


class ShardLayout:
    """Locations of the samples and the runs of a dataset. Thread-safe."""

    def __init__(self, shards: ShardTable, directory: SampleDirectory, run: IntArray) -> None:
        """Describe ``shards`` with the samples in ``directory``; ``run`` has the samples of a run, by shard."""
        self.directory = directory
        self.firsts, self.run = shards.firsts, run
        self.count = int(self.firsts[-1])
        self._order = np.full(len(shards), _UNKNOWN, dtype=np.int8)

    def shards_of(self, ids: IntArray) -> IntArray:
        """The shard of each of these samples; int64 [n]."""
        found: IntArray = np.searchsorted(self.firsts, ids, side="right") - 1
        return found

    def byte_range(self, shard: int, first: int, end: int) -> ByteRange:
        """Samples ``first..end`` of one shard, at least one."""
        origin, run = int(self.firsts[shard]), int(self.run[shard])
        before = -((origin - first) // run)  # runs that begin before ``first``
        whole = end if end == int(self.firsts[shard + 1]) else origin + (end - origin) // run * run
        low = min(origin + before * run, end)
        edges = (low, whole) if whole > low else (first, first)
        heads = np.arange(*edges, run, dtype=np.int64)
        if self._in_order(shard):
            asked = np.concatenate((heads, np.minimum(heads + run, edges[1]) - 1, [first, end - 1]))
            located = self.directory.locate(asked)
            stops = located.offset + located.length
            runs = len(heads)
            starts, start, stop = located.offset[:runs], int(located.offset[-2]), int(stops[-1])
            stops = stops[runs : 2 * runs]
        else:
            located = self.directory.locate(np.arange(first, end, dtype=np.int64))
            inside = slice(edges[0] - first, edges[1] - first)
            offsets, ends = located.offset, located.offset + located.length
            start, stop = int(offsets.min()), int(ends.max())
            starts = np.minimum.reduceat(offsets[inside], heads - edges[0]) if len(heads) else heads
            stops = np.maximum.reduceat(ends[inside], heads - edges[0]) if len(heads) else heads
        where = (starts - start).tolist(), (stops - start).tolist()
        return ByteRange(shard, start, stop, first, end, (edges[0] - origin) // run, edges, *where)

    def _in_order(self, shard: int) -> bool:
        if self._order[shard] == _UNKNOWN:
            found = self.directory.in_order(int(self.firsts[shard]), int(self.firsts[shard + 1]))
            self._order[shard] = _IN_ORDER if found else _ANYHOW
        return bool(self._order[shard] == _IN_ORDER)


class Grid:
    """One division of a dataset: chunks 0..total-1, and a reader's knowledge of them."""

    def __init__(self, layout: ShardLayout, group: int, parts: int = 1) -> None:
        """Cut chunks of ``group`` samples, or at most ``parts`` to a group."""
        self._layout, self._group = layout, group
        self.held = -(-group // parts)
        """Most samples of a chunk."""
        self._parts = -(-group // self.held)
        firsts = layout.firsts[:-1]
        cells = self._cells(firsts)
        # Shards that begin inside of a cell cut it in two, so that all chunks from there on have a higher number.
        self._extra = np.cumsum(self._first_of(cells) != firsts)
        self._begins = cells + self._extra
        self.total = int(self._cells(layout.firsts[-1:] - 1)[0] + self._extra[-1]) + 1
        self._kept: dict[int, ByteRange] = {}
        self._runs_kept = 0
        self.area = Area(0)
        self.begins = np.empty(0, dtype=np.int64)
        """First bytes of the chunks that were read, in their shards."""
        self.refused = np.empty(0, dtype=np.bool_)
        """Chunks that are too long or damaged."""
        self.spent = np.empty(0, dtype=np.float32)
        """Samples read piecewise from each, until it is forgotten."""
        self.seen = np.empty(0, dtype=np.int64)
        """The misses at the time when that was last counted."""
        self.misses = 0

    def allocate(self) -> None:
        """Make room for a reader's knowledge."""
        self.area = Area(self.total)
        self.begins = np.zeros(self.total, dtype=np.int64)
        self.refused = np.zeros(self.total, dtype=np.bool_)
        self.spent = np.zeros(self.total, dtype=np.float32)
        self.seen = np.zeros(self.total, dtype=np.int64)

    def _cells(self, ids: IntArray) -> IntArray:
        """Parts of groups by number, as if there were no shards; int64 [n]."""
        if self._parts == 1:
            return ids // self._group
        return ids // self._group * self._parts + ids % self._group // self.held

    def _first_of(self, cells: Any) -> Any:
        return cells // self._parts * self._group + cells % self._parts * self.held

    def chunks_of(self, ids: IntArray, shards: npt.NDArray[Any]) -> IntArray:
        """The chunk of each of these samples, which lie in these shards; int64 [n]."""
        found: IntArray = self._cells(ids) + self._extra[shards]
        return found

    def distinct(self, chunks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the results of ``np.unique``: the distinct chunks, each one's place among them, and their
        counts.
        """
        if self.total > _COUNTED:
            return np.unique(chunks, return_inverse=True, return_counts=True)
        counts = np.bincount(chunks, minlength=self.total)
        found = np.flatnonzero(counts)
        index_of = np.empty(self.total, dtype=np.int64)
        index_of[found] = np.arange(len(found))
        return found, index_of[chunks], counts[found]

    def byte_range(self, chunk: int) -> ByteRange:
        """Return the location of ``chunk``."""
        found = self._kept.get(chunk)
        if found is None:
            found = self._layout.byte_range(*self.samples(chunk))
            if self._runs_kept >= _KEPT:
                self._kept.clear()
                self._runs_kept = 0
            self._kept[chunk] = found
            self._runs_kept += _AS_RUNS + len(found.starts)
        return found

    def samples(self, chunk: int) -> tuple[int, int, int]:
        """Return the shard of a chunk, its first sample and the one after its last."""
        shard = int(np.searchsorted(self._begins, chunk, side="right")) - 1
        cell, firsts = chunk - int(self._extra[shard]), self._layout.firsts
        first, end = int(self._first_of(cell)), int(self._first_of(cell + 1))
        return shard, max(first, int(firsts[shard])), min(end, int(firsts[shard + 1]))
