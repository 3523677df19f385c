"""Choice of what a job keeps: mode, cut, split and codec, by the costs of all its epochs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from hapi.profiler.cost import memory
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing, Mode
from hapi.profiler.reuse.crossings import Crossings
from hapi.profiler.reuse.facts import SECONDS, CodecCost, Objective, Prices, ReuseFacts
from hapi.profiler.reuse.job_cost import JobCost, JobPricer
from hapi.profiler.reuse.verdict import (
    LEAST_GAIN,
    TIE,
    better,
    kept_before,
    order_of,
    reason_of,
    rejection_of,
)
from hapi.profiler.stages.alternation import Alternation

ALWAYS = "features are kept in any case"
_SHARES = (0.5, 0.875)
"""Shares at which epochs are priced, beside none and all, for the lowest price."""
_LIMIT_STEPS = 24
"""Steps of the search for the share that is read in the time in which the others are computed."""


@dataclass(frozen=True, kw_only=True)
class Considered:
    """The best choice of one mode."""

    mode: Mode
    cost: JobCost | None
    """Its costs; None where the mode is not possible."""
    rejected: str
    """Reason why it was not chosen; empty for the chosen one."""


@dataclass(frozen=True, kw_only=True)
class ReusePlan:
    """The choice for a job, with the alternatives."""

    objective: Objective
    epochs: int
    """Epochs that it is for."""
    cost: JobCost
    """Costs of the job as chosen."""
    reason: str
    """Reason for the choice, in one line."""
    candidates: tuple[Considered, ...]
    """The best of each mode."""

    @property
    def choice(self) -> Choice:
        """The choice."""
        return self.cost.choice

    @property
    def mode(self) -> Mode:
        """The mode."""
        return self.choice.mode

    @property
    def cut(self) -> int:
        """Layer whose output is kept, here or there; 0 for stored samples or nothing."""
        return self.choice.cut

    @property
    def split(self) -> int:
        """Split of the samples that are not kept."""
        return self.choice.crossing.split

    @property
    def alternation(self) -> Alternation | None:
        """Split that takes some batches instead of :attr:`split`, and their share."""
        return self.choice.crossing.alternation

    @property
    def codec(self) -> str:
        """Name of the codec of what is kept."""
        return self.choice.codec.name

    @property
    def seconds(self) -> float:
        """Seconds of the job."""
        return self.cost.seconds

    @property
    def money(self) -> float:
        """Money for the job."""
        return self.cost.money

    @property
    def kept(self) -> float:
        """Share of the samples that is kept when the job ends."""
        return self.cost.kept

    def to_json(self) -> dict[str, Any]:
        """Return the plan as it is in a run's report."""
        return {"mode": self.mode, "cut": self.cut, **dataclasses.asdict(self)}


def choose_reuse(
    profile: Profile,
    job: Job,
    facts: ReuseFacts,
    *,
    prices: Prices | None = None,
    objective: Objective = "time",
    splits: Sequence[int] | None = None,
    always: bool = False,
) -> ReusePlan:
    """Return the choice that makes the whole job shortest, or cheapest.

    Args:
        profile: the measurements.
        job: the training; ``epochs`` are those to come.
        facts: room, and what is kept already.
        prices: of bytes and hours.
        objective: ``time``, or ``money``.
        splits: those that may be taken; None for all that fit the client's memory.
        always: features of the last split are kept here in any case.
    """
    prices = prices or Prices()
    costs: dict[Mode, JobCost | None] = dict.fromkeys(
        ("recompute", "keep samples", "keep there", "keep here")
    )
    order = order_of(objective)
    taken = _fitting(profile, job) if splits is None else list(splits)
    bounds, priced = (
        _LowerBounds(prices, objective),
        _PricedChoices(profile, job, facts, prices, objective, taken),
    )
    for choice in choices(profile, facts, taken):
        if always and choice.mode == "keep here" and choice.cut != profile.last_split:
            continue
        best, pricer = costs[choice.mode], priced.pricer(choice)
        if best is not None and bounds.of(pricer) > order(best)[0] * (1 + TIE):
            continue
        cost = pricer.job_cost(prices)
        if best is None or better(order(cost), order(best)):
            costs[choice.mode] = cost
    features = costs["keep here"]
    if features is not None:
        costs["keep here"] = priced.limited(features)
    if job.alternate:
        modes: tuple[Mode, ...] = ("recompute", "keep here")
        for mode in modes[: 1 if facts.rounded else 2]:  # what two splits round is kept apart
            found = costs[mode]
            costs[mode] = None if found is None else priced.alternating(found)
    return _decided(job, facts, objective, costs, always)


class _LowerBounds:
    """Lower bounds of what jobs cost that keep features here, without pricing all of their epochs."""

    def __init__(self, prices: Prices, objective: Objective) -> None:
        self._prices = prices if objective == "money" else SECONDS
        self._whole: dict[tuple[int, CodecCost], float] = {}
        """Price of an epoch in which all is read, by cut and codec, whatever the split."""

    def of(self, pricer: JobPricer) -> float:
        """Return the bound: the first epoch, as if nothing were written in it, and later ones as they cost at best."""
        choice = pricer.choice
        if choice.mode != "keep here":
            return 0.0
        first = self._epoch(pricer, pricer.kept_before)
        if pricer.room < 1:
            return sum(views for views, _ in pricer.visits) * first
        key = choice.cut, choice.codec
        if key not in self._whole:
            self._whole[key] = self._epoch(pricer, 1.0)
        # Where a disk is slow, an epoch that reads a part and computes the rest may cost less.
        later = min(first, self._whole[key], *(self._epoch(pricer, share) for share in _SHARES))
        return sum(views * (first + (epochs - 1) * later) for views, epochs in pricer.visits)

    def _epoch(self, pricer: JobPricer, share: float) -> float:
        epoch = pricer.epoch(share)
        seconds = epoch.epoch(pricer.profile.link.bits_per_second)
        return self._prices.of(pricer.job.samples * epoch.sent_bytes, epoch.server_epoch(), seconds)


def _fitting(profile: Profile, job: Job) -> list[int]:
    """The splits that fit the client's memory, earliest first; all of them if none does."""
    every = list(range(profile.last_split + 1))
    if job.memory_bytes is None:
        return every
    return [s for s in every if memory(profile, job, s).peak <= job.memory_bytes] or every


def choices(profile: Profile, facts: ReuseFacts, splits: Sequence[int]) -> Iterator[Choice]:
    """Yield every choice that could be the best one.

    A cut is left out where a later one takes no more bytes with some codec that is no slower: it costs no more in any
    epoch, and leaves less to compute.
    """
    crossings = {
        split: [Crossing(split=split, wire=wire) for wire in facts.wire_at(split)] for split in splits
    }
    for crossing in chain.from_iterable(crossings.values()):
        yield Choice(mode="recompute", cut=0, crossing=crossing)
    if facts.client is not None and not facts.samples_refused and 0 in splits:
        yield Choice(mode="keep samples", cut=0, crossing=Crossing(split=0))
    if facts.refused:
        return
    if facts.server is not None:
        for split in splits:
            for codec, crossing in product(facts.codecs_at(split), crossings[split]) if split else ():
                yield Choice(mode="keep there", cut=split, crossing=crossing, codec=codec)
    if facts.client is not None:
        for cut, codec in worthwhile_cuts(profile, facts):
            for split in splits:
                for crossing in crossings[split] if split <= cut else ():
                    yield Choice(mode="keep here", cut=cut, crossing=crossing, codec=codec)


def worthwhile_cuts(profile: Profile, facts: ReuseFacts) -> list[tuple[int, CodecCost]]:
    """Return the cuts with their codecs that no later cut makes useless, the latest first."""
    found: list[tuple[int, CodecCost, tuple[float, float, float, float]]] = []
    for cut in range(profile.last_split, 0, -1):
        raw, share = profile.layers[cut - 1].output_bytes, facts.client_share(cut)
        for codec in facts.codecs_at(cut):
            costs = (raw / codec.ratio, raw / codec.encode, raw / codec.decode, float(raw))
            later = [known for at, _, known in found if at > cut and facts.client_share(at) >= share]
            if not any(all(x <= y for x, y in zip(known, costs, strict=True)) for known in later):
                found.append((cut, codec, costs))
    return [(cut, codec) for cut, codec, _ in found]


class _PricedChoices:
    """Prices choices of one job, and refines the best ones."""

    def __init__(
        self,
        profile: Profile,
        job: Job,
        facts: ReuseFacts,
        prices: Prices,
        objective: Objective,
        splits: Sequence[int],
    ) -> None:
        self._profile, self._job, self._facts, self._prices = profile, job, facts, prices
        self._order = order_of(objective)
        self._crossings = Crossings(profile, facts, splits, prices if objective == "money" else SECONDS)

    def pricer(self, choice: Choice) -> JobPricer:
        """Return what prices ``choice``, with the best split once nothing more comes into the cache."""
        pricer = JobPricer(self._profile, self._job, self._facts, choice)
        later = self._crossings.later(pricer)
        if later in (None, choice.crossing):
            return pricer
        return JobPricer(self._profile, self._job, self._facts, replace(choice, later=later))

    def _less(self, one: Choice, best: JobCost) -> JobCost:
        """The lower one of the costs of a choice and of the best."""
        cost = JobPricer(self._profile, self._job, self._facts, one).job_cost(self._prices)
        return cost if better(self._order(cost), self._order(best)) else best

    def limited(self, best: JobCost) -> JobCost:
        """Bound the share that is kept, where a disk reads too slowly to read all of it."""
        pricer = JobPricer(self._profile, self._job, self._facts, best.choice.settled)
        low, high = 0.0, pricer.room
        if high <= low or pricer.epoch_seconds(high) <= pricer.epoch_seconds(0.98 * high):
            return best
        for _ in range(_LIMIT_STEPS):
            third = (high - low) / 3
            if pricer.epoch_seconds(low + third) <= pricer.epoch_seconds(high - third):
                high -= third
            else:
                low += third
        return self._less(self.pricer(replace(best.choice, limit=high, later=None)).choice, best)

    def alternating(self, best: JobCost) -> JobCost:
        """Let the batches of samples that are not kept alternate between two splits, where that is faster or cheaper:
        while the cache fills, after that, or both."""
        choice = best.choice
        pricer = JobPricer(self._profile, self._job, self._facts, choice)
        firsts = [choice.crossing, self._crossings.two(pricer, pricer.kept_before)]
        laters: list[Crossing | None] = [None]
        if self._crossings.change(pricer):
            later = choice.settled.crossing
            laters = [later, self._crossings.two(pricer, pricer.room) or later]
        for first, later_one in product(firsts, laters):
            if first is not None:
                both = choice.at(first)
                best = self._less(both if later_one is None else both.then(later_one), best)
        return best


def _decided(
    job: Job,
    facts: ReuseFacts,
    objective: Objective,
    costs: dict[Mode, JobCost | None],
    always: bool,
) -> ReusePlan:
    order = order_of(objective)
    plain = costs["recompute"]
    if plain is None:  # there is always a split
        raise ValueError("no split to choose from")
    best = plain
    for cost in costs.values():
        if cost is not None and better(order(cost), order(best)):
            best = cost
    had = kept_before(facts, best.choice)
    gain = 1 - order(best)[0] / order(plain)[0] if order(plain)[0] > 0 else 0.0
    if best is not plain and not had and gain < LEAST_GAIN:
        best = plain
    forced = costs["keep here"] if always else None
    best = forced or best
    return ReusePlan(
        objective=objective,
        epochs=job.epochs,
        cost=best,
        reason=reason_of(job, facts, objective, best, costs) if forced is None else ALWAYS,
        candidates=tuple(
            Considered(mode=mode, cost=cost, rejected=rejection_of(mode, cost, best, facts, objective))
            for mode, cost in costs.items()
        ),
    )
