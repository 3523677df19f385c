"""Checksums of runs of samples, so that a chunk is checked in a few steps instead of sample by sample.

A run is a number of consecutive samples of a shard that have about 64 KB together; a chunk is a few runs. A
checksum of every sample of 512 B costs 0.27 microseconds, most of it Python. Runs are only a shortcut: if one
does not fit, or there is none, the samples' own checksums decide, and name the damaged sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import HashArray, IntArray

RUN_BYTES = 64 << 10
"""Bytes of a run, in the mean of its shard: the smallest chunk that anybody reads, and hashed at full speed."""


def run_samples(sizes: npt.ArrayLike, counts: npt.ArrayLike) -> IntArray:
    """Return the samples of a run, for shards of so many bytes and samples; int64 like the arguments.

    It is 1 for shards of samples larger than half of :data:`RUN_BYTES`: they have no runs.
    """
    size, count = np.asarray(sizes, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    # Divided in two steps: sizes up to 2**48 and counts up to 2**40 would overflow as a product.
    mean = np.maximum(1.0, size / np.maximum(1, count))
    found: IntArray = np.clip((RUN_BYTES / mean).astype(np.int64), 1, np.maximum(1, count))
    return found


def runs_of(sizes: npt.ArrayLike, counts: npt.ArrayLike) -> IntArray:
    """Return the number of runs of such shards; int64 like the arguments."""
    run = run_samples(sizes, counts)
    found: IntArray = np.where(run > 1, -(-np.asarray(counts, dtype=np.int64) // run), 0)
    return found


def run_sums(data: Any, offsets: IntArray) -> HashArray:
    """Return the checksums of the runs of a shard; sample i is ``data[offsets[i]:offsets[i + 1]]``; uint64
    [runs].
    """
    count = len(offsets) - 1
    run = int(run_samples(len(data), count))
    if run == 1:
        return np.empty(0, dtype=np.uint64)
    edges = [*offsets[:-1:run].tolist(), int(offsets[-1])]
    return digests(memoryview(data), edges[:-1], edges[1:])


class Runs:
    """The runs of all shards of a dataset."""

    def __init__(self, sizes: IntArray, counts: IntArray, sums: HashArray) -> None:
        """Describe the runs of shards.

        Args:
            sizes: bytes of each shard, int64.
            counts: samples of each shard, int64.
            sums: checksums of all runs, shard after shard, uint64; or none at all.
        """
        self.samples = run_samples(sizes, counts)
        """Samples of a run, by shard; int64 [shards]."""
        lengths = runs_of(sizes, counts) if len(sums) else np.zeros(len(counts), dtype=np.int64)
        self._firsts = np.cumsum(lengths) - lengths
        self._known = lengths > 0
        self._sums = sums

    def fit(self, shard: int, first: int, view: memoryview, starts: list[int], stops: list[int]) -> bool:
        """Return whether runs ``first``, ``first + 1``, ... of ``shard`` are sound; False also for unknown
        runs.

        Args:
            shard: number of the shard.
            first: number of the first run.
            view: bytes that hold the runs.
            starts: first byte of each run in ``view``.
            stops: end of each run; between its samples lie any bytes of another format.
        """
        if not self._known[shard]:
            return False
        at = int(self._firsts[shard]) + first
        expected: list[int] = self._sums[at : at + len(starts)].tolist()
        return _digests(view, starts, stops) == expected


def digests(view: memoryview, starts: list[int], stops: list[int]) -> HashArray:
    """Return the checksums of parts of a buffer; uint64 [n].

    Args:
        view: the buffer.
        starts: first byte of each part, [n].
        stops: end of each part, excluded, [n].
    """
    return np.array(_digests(view, starts, stops), dtype=np.uint64)


def _digests(view: memoryview, starts: list[int], stops: list[int]) -> list[int]:
    digest_of = xxhash.xxh3_64_intdigest
    return [digest_of(view[a:b]) for a, b in zip(starts, stops, strict=True)]
