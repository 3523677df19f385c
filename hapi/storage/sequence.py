"""The order of an epoch: a pure function of (seed, epoch, number of samples).

DLFS ("seeded sequence") lets every node compute the same global order by itself. Ours must also be the same
for every version of every library, so it uses no random generator but a fixed integer mix: samples are
sorted by a 64-bit hash of (seed, epoch, sample), ties by sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hapi.errors import UsageError

IntArray = npt.NDArray[np.int64]

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64, a bijection on 64-bit integers."""
    z = values.copy()
    for shift, multiplier in _MULTIPLIERS:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    z ^= z >> np.uint64(31)
    return z


def _mix_one(value: int) -> int:
    return int(mix64(np.array([value & _MASK], dtype=np.uint64))[0])


def sample_hash(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash for each of the samples 0..count-1; uint64 [count]."""
    for name, value in (("seed", seed), ("epoch", epoch), ("count", count)):
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise UsageError(f"{name}: expected an integer from 0 to 2**63 - 1, got {value!r}")
    key = _mix_one(_mix_one(seed + _GAMMA) + epoch + _GAMMA)
    values = np.arange(1, count + 1, dtype=np.uint64)
    values *= np.uint64(_GAMMA)
    values += np.uint64(key)
    return mix64(values)


def epoch_sequence(seed: int, epoch: int, count: int) -> IntArray:
    """The order of samples in an epoch: a permutation of 0..count-1, int64 [count]."""
    return np.argsort(sample_hash(seed, epoch, count), kind="stable").astype(np.int64, copy=False)


def batches(sequence: IntArray, batch_size: int, drop_last: bool = False) -> Iterator[IntArray]:
    """Consecutive views of ``batch_size`` ids; the last may be shorter unless ``drop_last``."""
    if isinstance(batch_size, bool) or batch_size < 1:
        raise UsageError(f"batch size: expected an integer of at least 1, got {batch_size!r}")
    stop = len(sequence) - len(sequence) % batch_size if drop_last else len(sequence)
    for first in range(0, stop, batch_size):
        yield sequence[first : min(first + batch_size, stop)]
