"""Choice of what a job keeps: mode, cut, split and codec, by the costs of all its epochs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hapi import units
from hapi.profiler.cost import memory
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.facts import SECONDS, CodecCost, Objective, Prices, ReuseFacts
from hapi.profiler.reuse.job_cost import Choice, JobCost, JobPricer, Mode
from hapi.profiler.stages.alternation import Alternation, best_alternation

LEAST_GAIN = 0.01
"""Least part of the job that keeping must save where nothing is kept yet."""
ALWAYS = "features are kept in any case"
_TIE = 1e-9
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
        return self.choice.split

    @property
    def alternation(self) -> Alternation | None:
        """Split that takes some batches instead of :attr:`split`, and their share."""
        return self.choice.alternation

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
    order = _order(objective)
    taken = _fitting(profile, job) if splits is None else list(splits)
    bounds = _LowerBounds(prices, objective)
    for choice in choices(profile, facts, taken):
        if always and choice.mode == "keep here" and choice.cut != profile.last_split:
            continue
        best, pricer = costs[choice.mode], JobPricer(profile, job, facts, choice)
        if best is not None and bounds.of(pricer) > order(best)[0] * (1 + _TIE):
            continue
        cost = pricer.job_cost(prices)
        if best is None or _better(order(cost), order(best)):
            costs[choice.mode] = cost
    features = costs["keep here"]
    if features is not None:
        costs["keep here"] = _limited(profile, job, facts, prices, features, order)
    if job.alternate:
        modes: tuple[Mode, ...] = ("recompute", "keep here")
        for mode in modes[: 1 if facts.rounded else 2]:  # what two splits round is kept apart
            costs[mode] = _alternating(profile, job, facts, prices, objective, costs[mode], taken)
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


def _order(objective: Objective) -> Callable[[JobCost], tuple[float, float]]:
    if objective == "money":
        return lambda cost: (cost.money, cost.seconds)
    return lambda cost: (cost.seconds, cost.money)


def _better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether ``one`` is less, beyond rounding: on ties what was found first stays."""
    first, second = one[0] - other[0], one[1] - other[1]
    if abs(first) > _TIE * max(one[0], other[0]):
        return first < 0
    return second < -_TIE * max(one[1], other[1])


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
    for split in splits:
        for wire in facts.wire_at(split):
            yield Choice(mode="recompute", cut=0, split=split, wire=wire)
    if facts.client is not None and not facts.samples_refused and 0 in splits:
        yield Choice(mode="keep samples", cut=0, split=0)
    if facts.refused:
        return
    if facts.server is not None:
        for split in splits:
            for codec, wire in product(facts.codecs_at(split), facts.wire_at(split)) if split else ():
                yield Choice(mode="keep there", cut=split, split=split, codec=codec, wire=wire)
    if facts.client is not None:
        for cut, codec in worthwhile_cuts(profile, facts):
            for split in splits:
                for wire in facts.wire_at(split) if split <= cut else ():
                    yield Choice(mode="keep here", cut=cut, split=split, codec=codec, wire=wire)


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


def _limited(
    profile: Profile,
    job: Job,
    facts: ReuseFacts,
    prices: Prices,
    best: JobCost,
    order: Callable[[JobCost], tuple[float, float]],
) -> JobCost:
    """The same choice with the share that is kept bounded, where a disk reads too slowly to read all of it."""
    pricer = JobPricer(profile, job, facts, best.choice)
    low, high = 0.0, pricer.room
    if high <= low or pricer.epoch_seconds(high) <= pricer.epoch_seconds(0.98 * high):
        return best
    for _ in range(_LIMIT_STEPS):
        third = (high - low) / 3
        if pricer.epoch_seconds(low + third) <= pricer.epoch_seconds(high - third):
            high -= third
        else:
            low += third
    limited = JobPricer(profile, job, facts, replace(best.choice, limit=high)).job_cost(prices)
    return limited if _better(order(limited), order(best)) else best


def _alternating(
    profile: Profile,
    job: Job,
    facts: ReuseFacts,
    prices: Prices,
    objective: Objective,
    best: JobCost | None,
    splits: Sequence[int],
) -> JobCost | None:
    """The same choice with the samples that are not kept computed at two splits, where that is faster, or cheaper."""
    if best is None:
        return None
    choice = best.choice
    pricer = JobPricer(profile, job, facts, choice)
    wires = [(s, wire) for s in splits if not choice.cut or s <= choice.cut for wire in facts.wire_at(s)]
    pipelines = [pricer.at_split(split, wire, pricer.kept_before) for split, wire in wires]
    counted = prices if objective == "money" else SECONDS
    found = best_alternation(pipelines, profile.link.bits_per_second, counted)
    if found is None:
        return best
    wire, other_wire = (
        next(wire for (_, wire), pipeline in zip(wires, pipelines, strict=True) if pipeline is one)
        for one in (found.one, found.other)
    )
    both = replace(
        choice, split=found.one.split, wire=wire, alternation=found.alternation, other_wire=other_wire
    )
    cost = JobPricer(profile, job, facts, both).job_cost(prices)
    order = _order(objective)
    return cost if _better(order(cost), order(best)) else best


def _decided(
    job: Job,
    facts: ReuseFacts,
    objective: Objective,
    costs: dict[Mode, JobCost | None],
    always: bool,
) -> ReusePlan:
    order = _order(objective)
    plain = costs["recompute"]
    if plain is None:  # there is always a split
        raise ValueError("no split to choose from")
    best = plain
    for cost in costs.values():
        if cost is not None and _better(order(cost), order(best)):
            best = cost
    had = _kept_before(facts, best.choice)
    gain = 1 - order(best)[0] / order(plain)[0] if order(plain)[0] > 0 else 0.0
    if best is not plain and not had and gain < LEAST_GAIN:
        best = plain
    forced = costs["keep here"] if always else None
    best = forced or best
    return ReusePlan(
        objective=objective,
        epochs=job.epochs,
        cost=best,
        reason=_reason(job, facts, objective, best, costs) if forced is None else ALWAYS,
        candidates=tuple(
            Considered(mode=mode, cost=cost, rejected=_rejected(mode, cost, best, facts, objective))
            for mode, cost in costs.items()
        ),
    )


def _kept_before(facts: ReuseFacts, choice: Choice) -> float:
    on_server = choice.mode == "keep there"
    return facts.server_share(choice.cut) if on_server else facts.client_share(choice.cut, choice.split)


def _shown(cost: JobCost, objective: Objective) -> str:
    return f"{cost.money:.2f}" if objective == "money" else units.format_duration(cost.seconds)


def _reason(
    job: Job,
    facts: ReuseFacts,
    objective: Objective,
    best: JobCost,
    costs: dict[Mode, JobCost | None],
) -> str:
    plain = costs["recompute"]
    epochs = f"{job.epochs} epoch{'' if job.epochs == 1 else 's'}"
    if plain is not None and best is not plain:
        took = f"{epochs} for" if objective == "money" else f"{epochs} in"
        share = "" if best.kept >= 1 - 1e-9 else f"; there is room for {best.kept:.0%} of the samples"
        if best.choice.limit < 1:
            share = f"; more than {best.kept:.0%} of the samples would be read too slowly"
        return f"{took} {_shown(best, objective)} instead of {_shown(plain, objective)}{share}"
    return f"not worth keeping: {_why_not(job, facts, objective, costs)}"


def _why_not(job: Job, facts: ReuseFacts, objective: Objective, costs: dict[Mode, JobCost | None]) -> str:
    plain, kept = costs["recompute"], [c for m, c in costs.items() if m != "recompute" and c is not None]
    if facts.client is None and facts.server is None:
        return "there is no cache"
    if facts.refused and not kept:
        return facts.refused
    if job.epochs <= facts.views:
        epochs = "is one epoch only" if facts.views == 1 else "are no more epochs than views"
        return f"there {epochs}, and nothing is kept yet"
    order = _order(objective)
    best = min(kept, key=order, default=None)
    if best is None or plain is None:
        return facts.refused or "nothing can be kept"
    if best.kept < 0.005 and best.choice.limit == 1:
        return "the cache has no room, or its disk is too slow to fill it"
    if order(best)[0] <= order(plain)[0]:
        return f"it would save less than {LEAST_GAIN:.0%} of the job"
    return "what is kept would be read no faster than it is computed"


def _rejected(
    mode: Mode, cost: JobCost | None, best: JobCost, facts: ReuseFacts, objective: Objective
) -> str:
    if cost is best:
        return ""
    if cost is None:
        if mode == "keep samples":
            return facts.samples_refused or (
                "no cache here" if facts.client is None else "split 0 does not fit the memory"
            )
        if facts.refused:
            return facts.refused
        return "no cache here" if mode == "keep here" else "the server keeps no features"
    order = _order(objective)
    mine, chosen = order(cost)[0], order(best)[0]
    more = "dearer" if objective == "money" else "slower"
    if mine <= chosen * (1 + 1e-3):
        return f"not {'cheaper' if objective == 'money' else 'faster'} by more than {LEAST_GAIN:.0%}"
    ratio = mine / chosen if chosen > 0 else float("inf")
    return (
        f"{ratio:.1f} times the {'money' if objective == 'money' else 'time'}"
        if ratio >= 2
        else (f"{ratio - 1:.1%} {more}")
    )
