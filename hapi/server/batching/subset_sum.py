"""Filling memory as far as it goes: how many of each size, proven or with what is left to prove. Pure.

Maximise ``sum(n[c] * size[c])`` with ``0 <= n[c] <= limit[c]`` and the sum within ``room``: the bounded subset-sum
problem, NP-hard in the number of bits. What makes it quick here is that memory is asked for in few sizes, each
of which may be taken many times, or in few pieces altogether. See :func:`fill`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapi.arrays import IntArray
from hapi.errors import UsageError

LIST_BITS = (8, 10, 12, 12, 13, 14, 15)
"""Of each attempt: the logarithm of its lists' lengths."""
TABLE_BITS = 1 << 27
"""Largest table of reachable sums: pieces times units; 16 MiB."""
MAX_BYTES = 1 << 48
"""Largest size or room; sums of all pieces of an attempt then stay within 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """What was found."""

    counts: tuple[int, ...]
    """Of each size."""
    filled: int
    """Bytes."""
    bound: int
    """Bytes that no filling exceeds; equal to ``filled`` when that is proven to be the most."""
    sums: int
    """IntArray that were looked at: the work, whatever the machine."""


@dataclass(frozen=True)
class _Piece:
    """``times`` of one class at once."""

    index: int
    times: int
    weight: int


def fill(sizes: Sequence[int], limits: Sequence[int], room: int) -> Filling:
    """As much of ``room`` bytes as can be used by up to ``limits[c]`` times ``sizes[c]`` bytes (1 or more each).

    First everything in proportion, then the largest sizes into what is left. If some bytes remain, two lists of
    sums meet (Horowitz and Sahni, 1974): some pieces of what was taken or could be taken beside are opened again, half
    of them make either list, and the pair of sums that comes closest to the room is looked up; longer lists and
    other pieces follow, see :data:`LIST_BITS`. What is found is the most when

    1. the room is full but for less than the greatest common divisor of the sizes: more cannot be; or
    2. the pieces of all sizes were open, at most 30: then every combination was compared; or
    3. else a table of all reachable sums, of those taken or those left out (Bellman, 1957), has at most
       :data:`TABLE_BITS`.

    Many sizes with large limits have so many combinations that (1) is met at once, few pieces fall under (2).
    For what is neither, ``bound`` is above ``filled`` and says how much is unproven. Of equal fillings the one
    found is near to proportional.

    :class:`UsageError` for sizes, limits or a room out of range.
    """
    _check(sizes, limits, room)
    most = [min(limit, room // size) for size, limit in zip(sizes, limits, strict=True)]
    if _sum(most, sizes) <= room:
        return _filling(sizes, most, _sum(most, sizes), 0)
    unit = math.gcd(*(size for n, size in zip(most, sizes, strict=True) if n))
    # A size that does not go in at all counts for nothing, and need not be a multiple.
    weights, target = [max(1, size // unit) for size in sizes], room // unit
    counts, bound, work = _most(weights, most, target, _in_proportion(weights, most, limits, target))
    return _filling(sizes, counts, bound * unit, work)


def _most(
    weights: Sequence[int], most: Sequence[int], target: int, counts: list[int]
) -> tuple[list[int], int, int]:
    """Counts, the bound and the work, beginning with ``counts``, in units of the greatest common divisor."""
    best, work = _sum(counts, weights), 0
    for attempt, bits in enumerate(LIST_BITS):
        if best == target:
            return counts, target, work
        pieces, whole = _open(weights, most, 2 * bits, attempt)
        found = _refill(weights, most, target, counts, pieces)
        work += 1 << (len(pieces) // 2 + 1)
        if _sum(found, weights) > best:
            best, counts = _sum(found, weights), found
        if whole:
            return counts, best, work
    table = _Table.of(weights, most, target)
    if best == target or table is None:
        return counts, target, work
    counts = table.counts(most)
    return counts, _sum(counts, weights), work + table.bits // 64


def _sum(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(n * size for n, size in zip(counts, sizes, strict=True))


@dataclass(frozen=True)
class _Table:
    """Reachable sums, one bit each, of what is taken or of what is left out, whichever are fewer."""

    pieces: Sequence[_Piece]
    taken: bool
    lowest: int
    """Left out at least; 0 for what is taken."""
    highest: int

    @classmethod
    def of(cls, weights: Sequence[int], most: Sequence[int], target: int) -> _Table | None:
        """None when it would be too large."""
        pieces, _ = _open(weights, most, None, 0)
        out = _sum(most, weights) - target
        # Of more than this one could still be put in, and what is left out would be enough.
        most_out = out + max(w for n, w in zip(most, weights, strict=True) if n) - 1
        taken = target <= most_out
        table = cls(pieces, taken, 0 if taken else out, target if taken else most_out)
        return table if table.bits <= TABLE_BITS else None

    @property
    def bits(self) -> int:
        return len(self.pieces) * (self.highest + 1)

    def counts(self, most: Sequence[int]) -> list[int]:
        """Of each class, for the largest sum taken or the smallest left out."""
        mask = (1 << (self.highest + 1)) - 1
        reached = [1]
        for piece in self.pieces:
            reached.append((reached[-1] | reached[-1] << piece.weight) & mask)
        good = reached[-1] >> self.lowest
        end = good.bit_length() if self.taken else (good & -good).bit_length()
        left = self.lowest + end - 1
        counts = [0] * len(most)
        for piece, before in zip(reversed(self.pieces), reversed(reached[:-1]), strict=True):
            if not before >> left & 1:
                counts[piece.index] += piece.times
                left -= piece.weight
        return counts if self.taken else [n - out for n, out in zip(most, counts, strict=True)]


def _check(sizes: Sequence[int], limits: Sequence[int], room: int) -> None:
    if len(sizes) != len(limits) or len(sizes) > 4096:
        raise UsageError(f"{len(sizes)} sizes and {len(limits)} limits; expected as many, at most 4096")
    if not all(1 <= size <= MAX_BYTES for size in sizes) or min(limits, default=0) < 0:
        raise UsageError(f"sizes must be 1 to {MAX_BYTES} bytes and limits at least 0")
    if not 0 <= room <= MAX_BYTES:
        raise UsageError(f"{room} bytes of room; expected 0 to {MAX_BYTES}")


def _filling(sizes: Sequence[int], counts: Sequence[int], bound: int, work: int) -> Filling:
    return Filling(counts=tuple(counts), filled=_sum(counts, sizes), bound=bound, sums=work)


def _in_proportion(
    weights: Sequence[int], most: Sequence[int], limits: Sequence[int], target: int
) -> list[int]:
    """The same part of each limit, then one more of each that still goes in, then as many; the largest first."""
    total = _sum(limits, weights)
    counts = [min(n, limit * target // total) for n, limit in zip(most, limits, strict=True)]
    left = target - _sum(counts, weights)
    order = sorted(range(len(weights)), key=lambda c: -weights[c])
    for at_once in (1, max(most)):
        for c in order:
            more = min(at_once, most[c] - counts[c], left // weights[c])
            counts[c] += more
            left -= more * weights[c]
    return counts


def _open(
    weights: Sequence[int], most: Sequence[int], number: int | None, attempt: int
) -> tuple[list[_Piece], bool]:
    """Up to ``number`` pieces (None: all), single ones of the small sizes first, and whether these are all.

    The subsets of a class's pieces (1, 2, 4, ... and a rest) give every count up to their sum. Later attempts begin
    with other classes.
    """
    order = sorted((c for c in range(len(weights)) if most[c]), key=lambda c: weights[c])
    turn = attempt * (number or 0) // 2 % len(order)
    order = order[turn:] + order[:turn]
    pieces: list[_Piece] = []
    times = 1
    while order:
        for c in order:
            if len(pieces) == number:
                return pieces, False
            n = min(times, most[c] - times + 1)
            pieces.append(_Piece(c, n, n * weights[c]))
        times *= 2
        order = [c for c in order if most[c] >= times]
    return pieces, True


def _refill(
    weights: Sequence[int], most: Sequence[int], target: int, counts: Sequence[int], pieces: Sequence[_Piece]
) -> list[int]:
    """``counts`` with the classes of ``pieces`` anew, as near to ``target`` from below as their subsets come."""
    lowest = list(counts)
    opened = [0] * len(weights)
    for piece in pieces:
        opened[piece.index] += piece.times
    # Around what was taken: half of it below. Where the half is not whole, it is rounded in turns.
    for turn, c in enumerate(c for c, n in enumerate(opened) if n):
        below = (opened[c] + turn % 2) // 2
        lowest[c] = min(max(0, counts[c] - below), most[c] - opened[c])
    room = target - _sum(lowest, weights)
    halves = pieces[::2], pieces[1::2]
    left, right = (_subset_sums([p.weight for p in half]) for half in halves)
    ascending = np.sort(right)
    fitting = np.sort(left[left <= room])
    partners = ascending[np.searchsorted(ascending, room - fitting, "right") - 1]
    nearest = int(np.argmax(fitting + partners))
    for half, sums, chosen in zip(halves, (left, right), (fitting[nearest], partners[nearest]), strict=True):
        subset = int(np.argmax(sums == chosen))
        for bit, piece in enumerate(half):
            if subset >> bit & 1:
                lowest[piece.index] += piece.times
    return lowest


def _subset_sums(weights: Sequence[int]) -> IntArray:
    """Of all subsets: at index ``i`` the sum of the weights whose bits are set in ``i``."""
    sums = np.zeros(1, np.int64)
    for weight in weights:
        sums = np.concatenate((sums, sums + weight))
    return sums
