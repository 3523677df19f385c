"""The order of an epoch: a permutation, pure, and the same for ever (golden values)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.data.epoch_order import batches, epoch_sequence, mix64
from hapi.errors import UsageError

_MASK = (1 << 64) - 1


def _splitmix(state: int) -> int:
    """The published finaliser in plain integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _plain_sequence(seed: int, epoch: int, count: int) -> list[int]:
    gamma = 0x9E3779B97F4A7C15
    key = _splitmix((_splitmix((seed + gamma) & _MASK) + epoch + gamma) & _MASK)
    return sorted(range(count), key=lambda i: (_splitmix((key + (i + 1) * gamma) & _MASK), i))


def test_splitmix64_published_values() -> None:
    """First outputs of SplitMix64 seeded with 1234567, as in the reference code's test vectors."""
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1234567)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_golden() -> None:
    assert epoch_sequence(0, 0, 10).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert epoch_sequence(42, 3, 10).tolist() == [9, 7, 1, 5, 0, 3, 6, 4, 2, 8]


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 300))
def test_permutation_equal_to_the_plain_definition(seed: int, epoch: int, count: int) -> None:
    sequence = epoch_sequence(seed, epoch, count)
    assert sequence.dtype == np.int64
    assert sequence.tolist() == _plain_sequence(seed, epoch, count)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_sequence(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_no_position_is_favoured() -> None:
    """Over many epochs each sample's mean place is near the middle (4 standard errors)."""
    count, epochs = 40, 2000
    places = np.array([np.argsort(epoch_sequence(7, e, count)) for e in range(epochs)])
    error = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(places.mean(axis=0) - (count - 1) / 2).max() < 4 * error


@given(st.integers(0, 200), st.integers(1, 50), st.booleans())
def test_batches(count: int, size: int, drop_last: bool) -> None:
    sequence = epoch_sequence(1, 1, count)
    parts = list(batches(sequence, size, drop_last))
    kept = count - count % size if drop_last else count
    assert all(len(p) == size for p in parts[:-1]) and all(len(p) > 0 for p in parts)
    joined = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
    assert joined.tolist() == sequence[:kept].tolist()


@pytest.mark.parametrize("arguments", [(-1, 0, 5), (0, -1, 5), (0, 0, -1), (2**63, 0, 1), (True, 0, 1)])
def test_wrong_arguments(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        epoch_sequence(*arguments)
    with pytest.raises(UsageError):
        next(batches(epoch_sequence(0, 0, 3), 0))
