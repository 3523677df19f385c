"""Shuffle quality: 1 for full permutations, 0 for the stored order, between them by the memory that is used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.storage.shuffle_quality import chunk_reads, permuted_entropy, quality
from hapi.data.epoch_order import chunk_sequence, epoch_sequence
from hapi.errors import UsageError

COUNT, WINDOW = 40_000, 100


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([(2_000, 50), (COUNT, WINDOW), (10_007, 64)]))
def test_a_full_permutation_is_one(seed: int, sizes: tuple[int, int]) -> None:
    count, window = sizes
    found = quality(epoch_sequence(seed, 0, count), window)
    assert found.spread == pytest.approx(1, abs=0.02)  # 0.012 is the most of all these seeds
    assert found.surprise == pytest.approx(1, abs=0.02)
    assert found.lowest > 0.85  # the worst of some hundred noisy values


def test_orders_without_randomness_are_zero() -> None:
    stored = np.arange(COUNT)
    stride = stored.reshape(100, -1).T.ravel()
    for order in (stored, stored[::-1], np.roll(stored, COUNT // 2), stride):
        assert quality(order, WINDOW).score == pytest.approx(0, abs=0.01)
    assert quality(stride, WINDOW).spread > 1  # it travels, but everybody knows where to


def test_chunks_in_random_order_that_are_read_in_order() -> None:
    """A random order of shards, as of a reader without a buffer, is little more than the stored order."""
    shards = np.random.default_rng(0).permutation(COUNT // 1000)
    order = (shards[:, None] * 1000 + np.arange(1000)).ravel()
    assert quality(order, WINDOW).score < 0.1


def test_a_larger_window_is_better() -> None:
    scores = [
        quality(chunk_sequence(1, 0, COUNT, 200, w), WINDOW).score for w in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    assert scores == sorted(scores) and scores[0] < 0.3 and scores[-1] > 0.9
    whole = quality(chunk_sequence(1, 0, COUNT, 200, 200), WINDOW)
    assert whole.score == pytest.approx(1, abs=0.01)


def test_smaller_chunks_are_better_at_equal_memory() -> None:
    scores = [quality(chunk_sequence(2, 0, COUNT, 4000 // w, w), WINDOW).score for w in (4, 8, 16, 40)]
    assert scores == sorted(scores)


def test_every_part_of_an_epoch_is_alike() -> None:
    found = quality(chunk_sequence(3, 0, COUNT, 100, 32), WINDOW)
    assert found.lowest > 0.9 * found.spread


@pytest.mark.parametrize(
    ("count", "window", "run"), [(1000, 50, 50), (1000, 50, 200), (130, 64, 64), (97, 10, 20), (8, 4, 4)]
)
def test_the_entropy_of_a_permutation(count: int, window: int, run: int) -> None:
    """The formula, against the mean of many permutations, counted plainly."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        shares = np.bincount(random.permutation(count)[:window] // run) / window
        found.append(-sum(p * np.log(p) for p in shares if p))
    assert permuted_entropy(count, window, run) == pytest.approx(
        np.mean(found), abs=5 * np.std(found) / 2000**0.5 + 1e-9
    )


@pytest.mark.parametrize(("count", "window"), [(10, 6), (0, 2), (100, 1), (100, 0)])
def test_too_few_samples(count: int, window: int) -> None:
    with pytest.raises(UsageError, match="shuffle quality: expected a window"):
        quality(np.arange(count), window)


def test_reads_of_chunks() -> None:
    order = np.array([0, 1, 4, 5, 2, 0, 6])  # chunks of two: 0 0 2 2 1 0 3
    assert [chunk_reads(order, 2, kept) for kept in (1, 2, 3)] == [5, 5, 4]
    assert chunk_reads(np.arange(1000), 10, 1) == 100
