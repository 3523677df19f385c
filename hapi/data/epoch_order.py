"""The order of an epoch: a pure function of (seed, epoch, number of samples, shuffle).

DLFS ("seeded sequence") lets every node compute the same global order by itself. Ours must also be the same
for every version of every library, so it uses no random generator but a fixed integer mix. There are two shuffles:

- the full permutation: samples are sorted by a 64-bit hash of (seed, epoch, sample), ties by sample;
- chunk windows (DLFS, section III-D2, chunk-level batching): a *chunk* is a run of ``group`` consecutive ids, in the
  order in which samples are stored. Chunks open one after the other in random order, ``window`` of them are open
  at any time, and each gives its samples at random moments while it is open. A reader of whole chunks then needs
  memory for ``window`` chunks and reads steadily.

The epoch is a circle for chunk windows: chunk of rank r of C opens at r / C and closes at (r + window) / C, so the
``window - 1`` chunks that are open over the end of the epoch are read twice, once at its beginning. In return
every part of an epoch is shuffled alike, and ``window >= C`` is as good as the full permutation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np

from hapi.arrays import HashArray, IntArray
from hapi.errors import UsageError
from hapi.text import counted
from hapi.wire.sequences import ChunkWindows

MAX_GROUP = (1 << 31) - 1
"""Largest group, and largest window: more would not fit the fixed-point arithmetic of an epoch."""

HOLDOUT_EPOCH = (1 << 62) - 1
"""The sequence's "epoch" that picks held-out samples, so that they do not depend on any training epoch."""

_KEPT = 64
"""Answers of :func:`revisited_groups` that are remembered."""

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1
_HALF = np.uint64(32)
_TEXT = re.compile(r"auto|full|chunks(?::([0-9]{1,10})(?::([0-9]{1,10}))?)?", re.ASCII)


def mix64(values: HashArray) -> HashArray:
    """The finaliser of SplitMix64, a bijection on 64-bit integers."""
    z = values.copy()
    for shift, multiplier in _MULTIPLIERS:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    z ^= z >> np.uint64(31)
    return z


def _mix_one(value: int) -> int:
    return int(mix64(np.array([value & _MASK], dtype=np.uint64))[0])


def _key(seed: int, epoch: int, count: int) -> int:
    for name, value in (("seed", seed), ("epoch", epoch), ("count", count)):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 0 <= value < 1 << 63:
            raise UsageError(f"{name}: expected an integer from 0 to 2**63 - 1, got {value!r:.80}")
    return _mix_one(_mix_one(int(seed) + _GAMMA) + int(epoch) + _GAMMA)


def _hashes(key: int, count: int) -> HashArray:
    values = np.arange(1, count + 1, dtype=np.uint64)
    values *= np.uint64(_GAMMA)
    values += np.uint64(key)
    return mix64(values)


def sample_hash(seed: int, epoch: int, count: int) -> HashArray:
    """A 64-bit hash for each of the samples 0..count-1; uint64 [count]."""
    return _hashes(_key(seed, epoch, count), count)


def sorted_positions(keys: HashArray) -> IntArray:
    """Return ``np.argsort(keys, kind="stable")`` of 64-bit keys that are hardly ever equal, several times as
    fast.

    Numpy sorts plain integers with vector instructions, so each key's place is put into its low bits. The few
    keys that are equal in the bits above are then sorted by themselves. int64 [n].
    """
    count = len(keys)
    bits = np.uint64(max(1, (count - 1).bit_length()))
    low = np.uint64((1 << int(bits)) - 1)
    packed = keys & ~low
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    positions = (packed & low).astype(np.int64)
    packed >>= bits
    ties = np.flatnonzero(packed[1:] == packed[:-1])
    if len(ties):
        unsettled = np.union1d(ties, ties + 1)
        those = positions[unsettled]
        positions[unsettled] = those[np.lexsort((keys[those], packed[unsettled]))]
    return positions


def epoch_sequence(seed: int, epoch: int, count: int) -> IntArray:
    """Return the fully permuted order of samples in an epoch.

    Args:
        seed: of the training.
        epoch: number from 0.
        count: samples of the dataset.

    Returns:
        A permutation of 0..count-1, int64 [count].
    """
    return sorted_positions(sample_hash(seed, epoch, count))


def chunk_sequence(seed: int, epoch: int, count: int, group: int, window: int) -> IntArray:
    """Return the order of samples in an epoch by chunk windows, see above.

    Memory is five arrays of ``count`` while it runs.

    Args:
        seed: of the training.
        epoch: number from 0.
        count: samples of the dataset.
        group: consecutive ids of a chunk.
        window: chunks open at a time.

    Returns:
        A permutation of 0..count-1, int64 [count].

    Raises:
        UsageError: a number is out of range.
    """
    for name, value in (("group", group), ("window", window)):
        if isinstance(value, bool) or not 1 <= value <= MAX_GROUP:
            raise UsageError(f"{name}: expected an integer from 1 to {MAX_GROUP}, got {value!r}")
    key = _key(seed, epoch, count)
    group = min(group, max(1, count))
    chunks = max(1, -(-count // group))
    if chunks > MAX_GROUP:
        raise UsageError(f"group {group}: {count} samples would be {chunks} chunks, at most {MAX_GROUP}")
    # The epoch has 2**64 moments, and uint64 wraps at its end as the circle of chunks does.
    step = (1 << 64) // chunks if chunks > 1 else 0
    ranked = _ranked(key, chunks)
    opens = np.empty(chunks, dtype=np.uint64)
    opens[ranked] = np.arange(chunks, dtype=np.uint64) * np.uint64(step)
    moments = _hashes(key, count)
    if window < chunks:
        # A sample's moment after its chunk opens: a random 32-bit fraction of the window's length.
        moments >>= _HALF
        moments *= np.uint64(step * window >> 32)
    moments += np.repeat(opens, group)[:count]
    return sorted_positions(moments)


def _ranked(key: int, chunks: int) -> IntArray:
    return sorted_positions(_hashes(_mix_one(~key), chunks))


@lru_cache(_KEPT)
def revisited_groups(seed: int, epoch: int, count: int, shuffle: Shuffle, limit: int) -> frozenset[int]:
    """Return the chunks of :func:`chunk_sequence` that are open over the end of the epoch, so at its
    beginning, too.

    Args:
        seed: of the training.
        epoch: number from 0.
        count: samples of the dataset.
        shuffle: chunk windows.
        limit: most chunks; those that open last are chosen.

    Returns:
        Numbers of chunks; none when all are open all the time.
    """
    chunks = -(-count // shuffle.group)
    twice = min(shuffle.window - 1, limit)
    if twice <= 0 or shuffle.window >= chunks:
        return frozenset()
    return frozenset(_ranked(_key(seed, epoch, count), chunks)[-twice:].tolist())


def batches(sequence: IntArray, batch_size: int, drop_last: bool = False) -> Iterator[IntArray]:
    """Return consecutive batches of a sequence, as views.

    Args:
        sequence: ids, int64 [n].
        batch_size: samples of a batch.
        drop_last: leave out a last batch that is shorter.
    """
    return iter(trainer_batches(sequence, batch_size, drop_last=drop_last))


def trainer_batches(
    sequence: IntArray, batch_size: int, trainer: int = 0, trainers: int = 1, *, drop_last: bool = False
) -> list[IntArray]:
    """Return the batches of one of several trainers: disjoint, together all of ``sequence``, equally many
    each.

    The sequence is cut into rounds of a batch for each trainer, in their order (DLFS, section III-D1). The
    rest at its end is one more round, shared out evenly, or not used with ``drop_last``. When that would
    leave a trainer without a sample, the last round takes it in, whose batches then have ``batch_size`` or
    one more.

    Args:
        sequence: ids of all trainers' samples, int64 [n].
        batch_size: samples of a trainer's batch.
        trainer: number of this trainer, from 0.
        trainers: number of all trainers.
        drop_last: leave the last, incomplete round out.

    Returns:
        Views of ``sequence``.

    Raises:
        UsageError: there are fewer samples than trainers.
    """
    if isinstance(batch_size, bool) or batch_size < 1:
        raise UsageError(f"batch size: expected an integer of at least 1, got {batch_size!r}")
    size, count = batch_size * trainers, len(sequence)
    rounds = count // size
    remainder = 0 if drop_last else count - rounds * size
    if 0 < remainder < trainers:
        if not rounds:
            raise UsageError(
                f"{trainers} trainers cannot share {counted(count, 'sample')}; start fewer trainers"
            )
        rounds, remainder = rounds - 1, remainder + size
    firsts = range(trainer * batch_size, rounds * size, size)
    found = [sequence[first : first + batch_size] for first in firsts]
    if remainder:
        begin = rounds * size
        found.append(
            sequence[begin + remainder * trainer // trainers : begin + remainder * (trainer + 1) // trainers]
        )
    return found


@dataclass(frozen=True)
class Shuffle:
    """Kind of an epoch's shuffle: full (``group`` 0), or by chunk windows.

    >>> str(Shuffle()), str(Shuffle(group=512, window=64))
    ('full', 'chunks:512:64')
    >>> Shuffle(group=2, window=2).sequence(seed=0, epoch=0, count=8).tolist()
    [2, 6, 0, 3, 5, 1, 4, 7]
    """

    group: int = 0
    """Samples of a chunk."""
    window: int = 0
    """Chunks open at a time."""

    def __post_init__(self) -> None:
        if (self.group, self.window) != (0, 0) and not (
            1 <= self.group <= MAX_GROUP and 1 <= self.window <= MAX_GROUP
        ):
            raise UsageError(f"{self}: group and window are integers from 1 to {MAX_GROUP}")

    @classmethod
    def parse(
        cls, text: str, default_shuffle: Self, *, prefers_chunks: bool = False, what: str = "shuffle"
    ) -> Self:
        """Parse ``auto``, ``full``, or ``chunks[:GROUP[:WINDOW]]``; :class:`UsageError` for anything else.

        Args:
            text: the user's choice.
            default_shuffle: the chunk windows that suit the store, for text without them.
            prefers_chunks: whether ``auto`` is these windows; else it is the full permutation.
            what: the name of the setting in an error.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{what}: expected 'auto', 'full' or 'chunks[:GROUP[:WINDOW]]' (such as chunks:512:64), "
                f"got {text[:80]!r}"
            )
        if text == "auto":
            return default_shuffle if prefers_chunks else cls()
        if text == "full":
            return cls()
        group, window = (None if number is None else int(number) for number in match.groups())
        try:
            return cls(
                default_shuffle.group if group is None else group,
                default_shuffle.window if window is None else window,
            )
        except UsageError:
            raise UsageError(f"{what} {text}: group and window are integers from 1 to {MAX_GROUP}") from None

    def __str__(self) -> str:
        """Text that :meth:`parse` reads, with all numbers."""
        return f"chunks:{self.group}:{self.window}" if self.group else "full"

    def sequence(self, seed: int, epoch: int, count: int) -> IntArray:
        """Return the order of ``count`` samples in an epoch; int64 [count]."""
        if not self.group:
            return epoch_sequence(seed, epoch, count)
        return chunk_sequence(seed, epoch, count, self.group, self.window)


FULL = Shuffle()


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """Order of the samples that one trainer trains on; the batches of every epoch follow from it.

    A place in it is (epoch, number of the batch): training resumes there with nothing else.
    """

    seed: int
    shuffle: Shuffle = FULL
    trainers: int = 1
    trainer: int = 0
    """Number of this trainer, from 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.trainer < self.trainers:
            raise UsageError(
                f"--trainer {self.trainer}: trainers are numbered from 0, below --trainers {self.trainers}"
            )

    def sequence(self, epoch: int, ids: IntArray, count: int) -> IntArray:
        """Return the ids of all trainers in the order of ``epoch``; int64.

        Chunks are those of the whole dataset, also if training uses only some samples: a reader of whole
        chunks has them.

        Args:
            epoch: number from 0.
            ids: all ids that are trained on.
            count: samples of the dataset.
        """
        if not self.shuffle.group or len(ids) == count:
            return ids[self.shuffle.sequence(self.seed, epoch, len(ids))]
        whole = self.shuffle.sequence(self.seed, epoch, count)
        among = np.zeros(count, dtype=np.bool_)
        among[ids] = True
        return whole[among[whole]]

    def batches(
        self, epoch: int, ids: IntArray, count: int, batch_size: int, *, drop_last: bool = False
    ) -> list[IntArray]:
        """Return this trainer's batches of ``epoch``: ids, by :func:`trainer_batches` of :meth:`sequence`.

        Args:
            epoch: number from 0.
            ids: all ids that are trained on.
            count: samples of the dataset.
            batch_size: samples of a batch.
            drop_last: leave an incomplete last batch out.
        """
        sequence = self.sequence(epoch, ids, count)
        return trainer_batches(sequence, batch_size, self.trainer, self.trainers, drop_last=drop_last)

    def windows(self, epoch: int = 0) -> ChunkWindows | None:
        """Return the chunk windows that requests tell a server; None for the full permutation."""
        if not self.shuffle.group:
            return None
        return ChunkWindows(seed=self.seed, epoch=epoch, group=self.shuffle.group, window=self.shuffle.window)

    def identity(self) -> dict[str, Any]:
        """Return the values that distinguish it from other orders of the same seed, for checkpoints and
        reports.
        """
        return {"shuffle": str(self.shuffle), "trainers": self.trainers, "trainer": self.trainer}
