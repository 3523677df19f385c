"""MosaicML Streaming's default shuffle, py1e, to compare ours with: the library's own where it is installed.

Else it is made after its description (docs.mosaicml.com, "Shuffling"): shards in random order; each sample is moved
by a uniformly random distance, so that a shard's samples lie within a range of about ``block`` samples around it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from hapi.arrays import IntArray


def streaming_version() -> str | None:
    """Return the version of the installed mosaicml-streaming; None when there is none."""
    try:
        return version("mosaicml-streaming")
    except PackageNotFoundError:
        return None


def py1e_sequence(seed: int, epoch: int, count: int, shard: int, block: int) -> IntArray:
    """The order of ``count`` samples in shards of ``shard``, on one node; int64 [count]."""
    sizes = np.full(-(-count // shard), shard)
    sizes[-1] = count - shard * (len(sizes) - 1)
    if streaming_version() is not None:
        library: Any = importlib.import_module("streaming.base.shuffle")
        return np.asarray(library.get_shuffle("py1e", sizes, 1, seed, epoch, block), dtype=np.int64)
    return described(np.random.default_rng((seed, epoch)), sizes, block)


def described(random: np.random.Generator, sizes: IntArray, block: int) -> IntArray:
    """The algorithm as it is described, for shards of ``sizes`` samples."""
    count, firsts = int(sizes.sum()), np.cumsum(sizes) - sizes
    shards = random.permutation(len(sizes))
    sizes, firsts = sizes[shards], firsts[shards]
    starts = np.cumsum(sizes) - sizes
    ids = np.repeat(firsts - starts, sizes) + np.arange(count)
    blocks = random.integers(int(0.75 * block), int(1.25 * block), len(sizes))
    reach = np.maximum(0, (blocks - sizes) / 2)
    low, high = np.maximum(-reach, -starts), np.minimum(reach, count - starts - sizes)
    # Which of a shard's samples comes first is as random as the distances.
    within = np.repeat(starts, sizes) + random.random(count) * np.repeat(sizes, sizes)
    moved = within + np.repeat(low, sizes) + random.random(count) * np.repeat(high - low, sizes)
    order: IntArray = ids[np.argsort(moved, kind="stable")]
    return order
