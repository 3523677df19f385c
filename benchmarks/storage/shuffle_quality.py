"""Quality of an order's shuffle, between 0 (as stored) and 1 (as a full permutation), and its cost.

A shuffle buffer (DLFS, section II-B) reads fast because samples stay near where they are stored, so a reading
rate says little without this beside it. Two entropies are taken, each over that of a full permutation:

- *spread*, how far samples travel: the order is cut into windows of as many samples as a training batch has,
  and
  stored ids into runs. The entropy of the runs that a window's samples come from is 0 for the stored order; the mean
  over all windows counts. It is taken for runs from a batch to a quarter of the dataset, and the worst length
  counts, as nobody knows in what runs like samples are stored. The full permutation's is exact (hypergeometric).
- *surprise*, how randomly: the entropy of the distances in store between one sample and the next. It is what
  MosaicML
  Streaming's simulator calls shuffle quality. A stride through the store (0, 1000, 2000, ..., 1, 1001, ...) has all the
  spread there is, and no surprise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.errors import UsageError

_RUN_FACTOR = 4
"""Factor from one length of stored runs to the next."""
_CELLS = 1024
"""Cells of the histogram of distances: at most so many, and one for 32 samples, so that entropy is hardly biased."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of one order; 1 is a full permutation, to within chance."""

    spread: float
    lowest: float
    """Quality of the worst window."""
    run: int
    """Stored samples of a run for which these two are lowest."""
    surprise: float

    @property
    def score(self) -> float:
        """The smaller of spread and surprise."""
        return min(self.spread, self.surprise)


def quality(sequence: IntArray, window: int) -> Quality:
    """The quality of ``sequence``, a permutation of 0..n-1, to batches of ``window`` samples.

    :class:`UsageError` when there are fewer than two windows.
    """
    if window < 2 or len(sequence) < 2 * window:
        raise UsageError(
            f"shuffle quality: expected a window from 2 to half of the {len(sequence)} samples, got {window}"
        )
    count, found = len(sequence), []
    run = window
    while run == window or run <= count // 4:
        spreads = _window_entropies(sequence, window, run) / permuted_entropy(count, window, run)
        found.append((float(spreads.mean()), float(spreads.min()), run))
        run *= _RUN_FACTOR
    spread, lowest, run = min(found)
    return Quality(spread=spread, lowest=lowest, run=run, surprise=_surprise(sequence))


def _window_entropies(sequence: IntArray, window: int, run: int) -> npt.NDArray[np.float64]:
    """The entropy of the stored runs in each whole window, in nats; float64 [windows]."""
    windows = len(sequence) // window
    runs = (sequence[: windows * window] // run).reshape(windows, window)
    runs.sort(axis=1)
    first = np.ones(runs.shape, dtype=bool)
    first[:, 1:] = runs[:, 1:] != runs[:, :-1]
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=runs.size)
    parts = np.add.reduceat(counts * np.log(counts), np.searchsorted(starts, np.arange(windows) * window))
    entropies: npt.NDArray[np.float64] = math.log(window) - parts / window
    return entropies


def permuted_entropy(count: int, window: int, run: int) -> float:
    """The expected entropy of a window of a full permutation of ``count`` samples stored in runs, in nats."""
    runs, last = divmod(count, run)
    total = runs * _run_entropy(count, window, run)
    return total + (_run_entropy(count, window, last) if last else 0.0)


def _run_entropy(count: int, window: int, size: int) -> float:
    """Entropy from one run of ``size`` stored samples: k of them are in the window with hypergeometric
    probability.
    """
    low = max(1, window + size - count)
    expected, whole = 0.0, _log_choose(count, window)
    for k in range(low, min(window, size) + 1):
        chance = math.exp(_log_choose(size, k) + _log_choose(count - size, window - k) - whole)
        expected -= chance * (k / window) * math.log(k / window)
    return expected


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _surprise(sequence: IntArray) -> float:
    count = len(sequence)
    cells = min(_CELLS, max(2, count // 32))
    found = np.bincount((np.diff(sequence) + count) * cells // (2 * count), minlength=cells)
    # Distances of a full permutation are distributed as a triangle over -count..count.
    edges = np.linspace(-1, 1, cells + 1)
    below = np.where(edges <= 0, (1 + edges) ** 2 / 2, 1 - (1 - edges) ** 2 / 2)
    return _entropy(found / found.sum()) / _entropy(np.diff(below))


def _entropy(shares: npt.NDArray[np.float64]) -> float:
    some = shares[shares > 0]
    return float(-(some * np.log(some)).sum())


def chunk_reads(sequence: IntArray, group: int, kept: int) -> int:
    """Chunks of ``group`` samples that are read when the ``kept`` most recently used ones are in memory."""
    chunks = sequence // group
    changes = chunks[np.flatnonzero(np.diff(chunks, prepend=-1))]
    recent: dict[int, None] = {}
    reads = 0
    for chunk in changes.tolist():
        if chunk in recent:
            del recent[chunk]
        else:
            reads += 1
        recent[chunk] = None
        if len(recent) > kept:
            del recent[next(iter(recent))]
    return reads
