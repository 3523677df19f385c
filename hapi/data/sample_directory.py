"""The sample directory: location of every sample, 16 bytes each, found by the sample's number.

After DLFS (section III-B), whose directory is an AVL tree of 16-byte entries keyed by a 48-bit hash of the
name. With 50 million samples such keys collide, and a tree is walked one sample at a time. Here it is an
array indexed by sample id, so that the locations of a whole batch are one gather. An entry is two 64-bit
words:

    word 0   bits 0..47 offset in the shard, bits 48..63 flags
    word 1   bits 0..31 number of the shard, bits 32..63 length

If all samples have one length and lie side by side, as many in each shard (packed tensors, tokens, features),
their locations are computed. The entries, a cache miss for each sample of a shuffled batch, are not read
then.

Bounds: shards below 256 TiB, samples of 1 byte to 4 GiB - 1, 2**32 shards (a shard may hold a single sample).
No flag has a meaning yet. All must be zero, so that today's reader refuses entries that it would
misunderstand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.data.shards import MAX_SHARD_SIZE, ShardTable
from hapi.errors import DataError, UsageError

MAX_OFFSET = MAX_SHARD_SIZE - 1
MAX_SAMPLE_BYTES = (1 << 32) - 1
MAX_SHARD = (1 << 32) - 1

ENTRY = np.dtype([("offset", "<u8"), ("shard", "<u4"), ("length", "<u4")])
"""An entry; "offset" is all of word 0, so a flag makes it larger than ``MAX_OFFSET``."""

_CHUNK = 1 << 16
"""Entries checked at once: what is computed for them stays in the processor's cache."""


@dataclass(frozen=True)
class Located:
    """Locations of n samples, in the order asked for."""

    ids: IntArray
    """int64 [n]."""
    shard: npt.NDArray[np.uint32]
    """uint32 [n], a place in the table of shards."""
    offset: IntArray
    """Bytes from the shard's start; int64 [n]."""
    length: IntArray
    """Bytes; int64 [n]."""

    def __len__(self) -> int:
        return len(self.shard)

    def part(self, low: int, high: int) -> Located:
        """Return samples ``low..high`` (high excluded) among them, views."""
        return Located(self.ids[low:high], self.shard[low:high], self.offset[low:high], self.length[low:high])

    def at(self, rows: IntArray) -> Located:
        """Return samples ``rows`` among them, int64 [k] in any order, copies."""
        return Located(self.ids[rows], self.shard[rows], self.offset[rows], self.length[rows])


@dataclass(frozen=True)
class Regular:
    """Samples of ``length`` bytes, side by side from ``offset`` on, ``samples`` in each shard but the last."""

    samples: int
    offset: int
    length: int

    def locate(self, ids: IntArray) -> Located:
        """Return locations as :meth:`SampleDirectory.locate` does, by arithmetic."""
        shard = ids // self.samples
        offset = ids - shard * self.samples
        offset *= self.length
        if self.offset:
            offset += self.offset
        return Located(ids, shard.astype(np.uint32), offset, np.full(len(ids), self.length, dtype=np.int64))

    @classmethod
    def guess(cls, entries: npt.NDArray[np.void], firsts: IntArray) -> Regular | None:
        """Return the only possible layout by the first sample and the shards' first ones, unchecked."""
        counts = np.diff(firsts)
        if (counts[:-1] != counts[0]).any() or counts[-1] > counts[0]:
            return None
        return cls(int(counts[0]), int(entries["offset"][0]), int(entries["length"][0]))

    def holds(self, low: int, entries: npt.NDArray[np.void]) -> bool:
        """Return whether ``entries`` of samples from ``low`` on, whose shards are right, have this layout."""
        if (entries["length"] != self.length).any():
            return False
        expected = self.locate(np.arange(low, low + len(entries), dtype=np.int64))
        return bool((entries["offset"] == expected.offset.view(np.uint64)).all())


class SampleDirectory:
    """Entries of samples 0..count-1; a view of the index's bytes."""

    def __init__(self, entries: npt.NDArray[np.void]) -> None:
        self.entries = entries
        """``ENTRY`` [count]."""
        self.regular: Regular | None = None
        """Found by :meth:`check`."""

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def empty(cls, count: int) -> Self:
        """A directory to be filled by :meth:`write`."""
        return cls(np.empty(count, dtype=ENTRY))

    @classmethod
    def from_words(cls, words: npt.NDArray[np.uint64]) -> Self:
        """Return the directory in ``words``, uint64 [count, 2], without a copy; call :meth:`check` before
        use.
        """
        return cls(words.view(ENTRY).reshape(-1))

    def words(self) -> npt.NDArray[np.uint64]:
        """The entries as uint64 [count, 2], without a copy."""
        return self.entries.view(np.uint64).reshape(-1, 2)

    def part(self, first: int, stop: int) -> Self:
        """Samples ``first..stop`` (stop excluded), a view."""
        return type(self)(self.entries[first:stop])

    def locate(self, ids: IntArray) -> Located:
        """Return shard, offset and length of these samples, whose ids must be valid (``Dataset.locate``
        checks that).
        """
        if self.regular is not None:
            return self.regular.locate(ids)
        found = self.entries.take(ids)  # a third faster than an index
        return Located(
            ids=ids,
            shard=np.ascontiguousarray(found["shard"]),
            offset=found.view(np.int64)[::2],  # without flags, word 0 is the offset
            length=found["length"].astype(np.int64),
        )

    def in_order(self, first: int, stop: int) -> bool:
        """Return whether samples ``first..stop`` (stop excluded) of one shard follow one another, gaps
        allowed.
        """
        for low in range(first, stop, _CHUNK):
            entries = self.entries[low : min(low + _CHUNK + 1, stop)]
            offset, length = entries["offset"], entries["length"]
            if (offset[1:] < offset[:-1] + length[:-1]).any():
                return False
        return True

    def write(self, first: int, shard: npt.ArrayLike, offset: npt.ArrayLike, length: npt.ArrayLike) -> None:
        """Set the locations of samples ``first``, ``first + 1``, ...

        Args:
            first: number of the first sample.
            shard: number of each one's shard, or one for all.
            offset: first byte of each in its shard.
            length: bytes of each.

        Raises:
            UsageError: an entry cannot hold a location; the first such sample is named.
        """
        offsets, lengths = np.asarray(offset), np.asarray(length)
        stop = first + len(lengths)
        shards = np.broadcast_to(np.asarray(shard), lengths.shape)
        for name, values, low, high in (
            ("shard", shards, 0, MAX_SHARD),
            ("offset", offsets, 0, MAX_OFFSET),
            ("length", lengths, 1, MAX_SAMPLE_BYTES),
        ):
            wrong = np.flatnonzero((values < low) | (values > high))
            if len(wrong):
                raise UsageError(
                    f"sample {first + int(wrong[0])}: its {name} is {values[wrong[0]]}, "
                    f"the directory holds {low} to {high}"
                )
        self.regular = None
        # The fields lie over two 64-bit words (see the module); flags stay zero.
        entries = self.entries[first:stop]

        entries["shard"], entries["offset"], entries["length"] = shards, offsets, lengths

    def check(self, shards: ShardTable, where: str, remedy: str) -> None:
        """Check that every sample lies within its shard.

        Samples belong to the shards in order, as many to each as it says. Within a shard they may lie in any
        way, also over one another.

        Args:
            shards: the dataset's shards.
            where: name of the index, for messages.
            remedy: advice for the user.

        Raises:
            DataError: a sample does not; the message names shard and sample.
        """
        firsts, sizes = shards.firsts, shards.size
        if firsts[-1] != len(self) or (firsts[1:] <= firsts[:-1]).any():
            raise DataError(
                f"{where}: it has places of {len(self)} samples, the shards have {firsts[-1]}; {remedy}"
            )
        regular = Regular.guess(self.entries, firsts) if len(self) else None
        for low in range(0, len(self), _CHUNK):
            high = min(low + _CHUNK, len(self))
            owner = _owners(firsts, low, high)
            entries = self.entries[low:high]
            offset, length = entries["offset"], entries["length"]
            wrong = entries["shard"] != owner
            wrong |= offset > MAX_OFFSET
            wrong |= length == 0
            wrong |= offset + length > sizes[owner]
            if wrong.any():
                at = int(np.argmax(wrong))
                number = int(owner[at])
                raise DataError(
                    f"{where}: sample {low + at} in shard {shards.key(number)} "
                    f"{_problem(entries[at], number, int(sizes[number]))}; {remedy}"
                )
            if regular is not None and not regular.holds(low, entries):
                regular = None
        self.regular = regular


def _owners(firsts: IntArray, low: int, high: int) -> IntArray:
    """Shard of each of samples ``low..high``: shard k has samples ``firsts[k]..firsts[k + 1]``."""
    first, last = np.searchsorted(firsts, [low, high - 1], side="right") - 1
    edges = np.clip(firsts[first : last + 2], low, high)
    return np.repeat(np.arange(first, last + 1, dtype=np.int64), edges[1:] - edges[:-1])


def _problem(entry: Any, shard: int, size: int) -> str:
    """Reason why an entry cannot be in ``shard`` of ``size`` bytes."""
    offset, length = int(entry["offset"]), int(entry["length"])
    if entry["shard"] != shard:
        return f"has its place in shard number {entry['shard']} instead of {shard}"
    if offset > MAX_OFFSET:
        return f"has flags ({offset >> 48:#x}) that this version of Hapi does not know"
    if length == 0:
        return "has no bytes"
    return f"has bytes {offset}..{offset + length}, but the shard only {size}"
