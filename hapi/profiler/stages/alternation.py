"""Two splits whose batches alternate, so that no tier is idle while the other one works. Pure.

At one split the tiers' work stands in one proportion, and the layers between two splits with small outputs often send
too much for any other. Batches of two splits together may have any proportion in between: while this side computes
the front of one batch, the server computes that of the next. Where frozen layers run changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import le
from typing import NamedTuple, Self

from hapi.profiler.profile import Job
from hapi.profiler.reuse.facts import SECONDS, Prices
from hapi.profiler.stages.pipeline import Loads, Pipeline, epoch_of

STEPS = 16
"""Shares are multiples of one over this."""
GAIN = 0.01
"""Smallest part of an epoch's seconds that must be saved, beside the best split alone. That stages of equal length hold
each other up is in the estimate already."""


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """Batches of one split with some of another among them, evenly spread."""

    split: int
    other: int
    share: float
    """Part of the batches that run at ``other``: a multiple of 1 / :data:`STEPS`, at most a half."""

    @classmethod
    def only(cls, split: int) -> Self:
        """Return the batches of one split alone."""
        return cls(split=split, other=split, share=0.0)

    def split_of(self, number: int) -> int:
        """Return the split of the batch of this number, from 0."""
        steps = round(self.share * STEPS)
        return self.other if (number + 1) * steps // STEPS > number * steps // STEPS else self.split

    @property
    def text(self) -> str:
        """The other split and its share, for people; empty where there is none."""
        return f"{self.share:.0%} of the batches at split {self.other}" if self.share else ""


class Alternating:
    """Seconds of an epoch whose batches alternate."""

    def __init__(self, one: Pipeline, other: Pipeline, share: float) -> None:
        """Mix two splits of one job; ``share``: part of the batches that run like ``other``."""
        self.one, self.other, self._share = one, other, share
        self.job: Job = one.job
        self.disk = self._mean(one.disk, other.disk)
        """Seconds of this side's disk for a sample."""
        self.sent_bytes = self._mean(one.sent_bytes, other.sent_bytes)

    @property
    def alternation(self) -> Alternation:
        """The splits and the share."""
        return Alternation(split=self.one.split, other=self.other.split, share=self._share)

    def _mean(self, one: float, other: float) -> float:
        return (1 - self._share) * one + self._share * other

    def fill(self, bs: int, bits: float) -> float:
        """Seconds from the first request to the whole batch."""
        return self._mean(self.one.fill(bs, bits), self.other.fill(bs, bits))

    def cycle(self, bs: int, bits: float) -> float:
        """Seconds from one batch to the next: the busiest resource, which has the work of both."""
        return self.one.loads(bs, bits).mixed(self.other.loads(bs, bits), self._share).cycle()

    def client(self, bs: int) -> float:
        """Seconds of a batch on this side."""
        return self._mean(self.one.client(bs), self.other.client(bs))

    def epoch(self, bits: float) -> float:
        """Seconds of an epoch."""
        return epoch_of(self, bits)

    def server_epoch(self) -> float:
        """Seconds of the whole server that an epoch takes."""
        return self._mean(self.one.server_epoch(), self.other.server_epoch())


class _Way(NamedTuple):
    """One of the splits, with a codec on the wire."""

    pipeline: Pipeline
    loads: Loads
    """Seconds of each resource for a batch."""
    extra: float
    """Price of a batch beside its seconds."""


def best_alternation(
    pipelines: Sequence[Pipeline], bits: float, prices: Prices = SECONDS
) -> Alternating | None:
    """Return the two splits and the share that make an epoch shortest, or cheapest.

    Args:
        pipelines: the splits that may be taken, of one job, each once for every codec on the wire; at least one.
        bits: the link's bits per second.
        prices: of what an epoch takes.

    Returns:
        The epochs; None where they save less than :data:`GAIN` of the best split's.
    """
    job, second = pipelines[0].job, prices.of(0.0, 0.0, 1.0)
    bs, batches = min(job.bs, job.samples), -(-job.samples // job.bs)
    ways = [_Way(one, one.loads(bs, bits), _extra(one, prices) / batches) for one in pipelines]
    useful = _useful(ways)
    found: tuple[Pipeline, Pipeline, int] | None = None
    lowest = (1 - GAIN) * min(second * way.loads.cycle() + way.extra for way in useful)
    for bound, number, other_number in _pairs(useful, second):
        way, its = useful[number], useful[other_number]
        if bound >= lowest:
            break
        if _bound(way, its, second) >= lowest:
            continue
        fewest = max(1, -(-STEPS // min(1 + min(way.pipeline.depth, its.pipeline.depth), batches)))
        price, steps = _best_steps(way, its, second, fewest)
        if price < lowest:
            lowest, found = price, (way.pipeline, its.pipeline, steps)
    if found is None:
        return None
    one, other, steps = found
    if 2 * steps > STEPS:
        one, other, steps = other, one, STEPS - steps
    both = Alternating(one, other, steps / STEPS)
    alone = min(second * pipeline.epoch(bits) + _extra(pipeline, prices) for pipeline in pipelines)
    if second * both.epoch(bits) + _extra(both, prices) > (1 - GAIN) * alone:
        return None
    return both


def _pairs(ways: Sequence[_Way], second: float) -> list[tuple[float, int, int]]:
    """Return all pairs with a lower bound of their batches' price, the lowest first; ``second``: price of one second.

    No share makes a resource less busy, or a batch cheaper, than the better of the two does.
    """
    return sorted(
        (second * max(map(min, way.loads, its.loads)) + min(way.extra, its.extra), number, other)
        for number, way in enumerate(ways)
        for other, its in enumerate(ways[:number])
        if way.pipeline.split != its.pipeline.split
    )


def _bound(one: _Way, other: _Way, second: float) -> float:
    """A higher lower bound of the same kind: as if both had the better one's load of each resource."""
    return second * Loads(*map(min, one.loads, other.loads)).cycle() + min(one.extra, other.extra)


def _best_steps(one: _Way, other: _Way, second: float, fewest: int) -> tuple[float, int]:
    """The lowest price of a batch, and the share of ``other`` in steps: prices are convex in it, as all loads are."""

    @cache
    def price(steps: int) -> float:
        share = steps / STEPS
        seconds = one.loads.mixed(other.loads, share).cycle()
        return second * seconds + (1 - share) * one.extra + share * other.extra

    low, high = fewest, STEPS - fewest
    while low < high:
        middle = (low + high) // 2
        if price(middle) <= price(middle + 1):
            high = middle
        else:
            low = middle + 1
    return price(low), low


def _extra(epoch: Pipeline | Alternating, prices: Prices) -> float:
    """Price of what an epoch takes beside its seconds."""
    return prices.of(epoch.job.samples * epoch.sent_bytes, epoch.server_epoch(), 0.0)


def _useful(ways: Sequence[_Way]) -> list[_Way]:
    """Those for which no other split needs no more of any resource, and of money."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda one: (sum(one.loads), one.extra, one.pipeline.split)):
        needs = (*way.loads, way.extra)
        if not any(all(map(le, (*other.loads, other.extra), needs)) for other in found):
            found.append(way)
    return found
