"""Division of free memory among admitted requests: by how much each one's batch is raised. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Bounds(NamedTuple):
    """Bounds of a request's batch."""

    sample_bytes: int
    """Bytes that each sample of its batch takes; at least 1."""
    low: int
    high: int


def raise_batches(requests: Sequence[Bounds], room: int) -> list[int]:
    """Return batches from ``low`` to ``high``; all above ``low`` takes at most ``room`` bytes.

    Each size of samples is raised by the same part of its possible growth, and the largest get the rest. Then
    no batch can be raised any more: unless all have their ``high``, less room is left than one sample takes
    of the smallest below it. Requests with the same bytes a sample get equal batches where their bounds
    allow.
    """
    by_size: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        by_size.setdefault(request.sample_bytes, []).append(index)
    limits = {size: sum(requests[i].high - requests[i].low for i in by_size[size]) for size in by_size}
    batches = [0] * len(requests)
    for size, extra in _in_proportion(limits, room).items():
        members = [requests[i] for i in by_size[size]]
        for index, batch in zip(by_size[size], _level(members, extra), strict=True):
            batches[index] = batch
    return batches


def _in_proportion(limits: dict[int, int], room: int) -> dict[int, int]:
    """Further samples of each size: the same part of its limit, one more if it still fits, then the rest."""
    total = max(1, sum(size * limit for size, limit in limits.items()))
    counts = {size: min(limit, limit * room // total) for size, limit in limits.items()}
    left = room - sum(size * count for size, count in counts.items())
    largest_first = sorted(limits, reverse=True)
    for at_once in (1, max(limits.values(), default=0)):
        for size in largest_first:
            more = min(at_once, limits[size] - counts[size], left // size)
            counts[size] += more
            left -= more * size
    return counts


def _level(bounds: Sequence[Bounds], extra: int) -> Iterator[int]:
    """The lower bounds raised by ``extra`` altogether, to one level where the bounds allow; the oldest get the rest."""
    level = rising = 0
    for bound, change in sorted([(b.low, 1) for b in bounds] + [(b.high, -1) for b in bounds]):
        if rising * (bound - level) > extra:
            break
        extra -= rising * (bound - level)
        level, rising = bound, rising + change
    each, remainder = divmod(extra, max(1, rising))
    level += each
    for _, low, high in bounds:
        more = 1 if remainder and low <= level < high else 0
        remainder -= more
        yield min(max(level, low), high) + more
