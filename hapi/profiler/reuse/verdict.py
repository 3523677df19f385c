"""Order of the costs of jobs, and the reasons for a choice among them, for people. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hapi import units
from hapi.profiler.profile import Job
from hapi.profiler.reuse.choice import Choice, Mode
from hapi.profiler.reuse.facts import Objective, ReuseFacts
from hapi.profiler.reuse.job_cost import JobCost

LEAST_GAIN = 0.01
"""Least part of the job that keeping must save where nothing is kept yet."""
TIE = 1e-9
"""Relative difference below which two costs are the same but for rounding."""


def order_of(objective: Objective) -> Callable[[JobCost], tuple[float, float]]:
    """Return what costs are compared by: what is aimed at, then the other."""
    if objective == "money":
        return lambda cost: (cost.money, cost.seconds)
    return lambda cost: (cost.seconds, cost.money)


def better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether ``one`` is less, beyond rounding: on ties what was found first stays."""
    first, second = one[0] - other[0], one[1] - other[1]
    if abs(first) > TIE * max(one[0], other[0]):
        return first < 0
    return second < -TIE * max(one[1], other[1])


def kept_before(facts: ReuseFacts, choice: Choice) -> float:
    """Return the share of the samples that ``choice`` finds kept."""
    if choice.mode == "keep there":
        return facts.server_share(choice.cut)
    return facts.client_share(choice.cut, choice.crossing.split)


def _shown(cost: JobCost, objective: Objective) -> str:
    return units.format_money(cost.money) if objective == "money" else units.format_duration(cost.seconds)


def reason_of(
    job: Job,
    facts: ReuseFacts,
    objective: Objective,
    best: JobCost,
    costs: dict[Mode, JobCost | None],
) -> str:
    """Return the reason for ``best`` among the ``costs`` of all modes, in one line."""
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
    order = order_of(objective)
    best = min(kept, key=order, default=None)
    if best is None or plain is None:
        return facts.refused or "nothing can be kept"
    if best.kept < 0.005 and best.choice.limit == 1:
        return "the cache has no room, or its disk is too slow to fill it"
    if order(best)[0] <= order(plain)[0]:
        return f"it would save less than {LEAST_GAIN:.0%} of the job"
    return "what is kept would be read no faster than it is computed"


def rejection_of(
    mode: Mode, cost: JobCost | None, best: JobCost, facts: ReuseFacts, objective: Objective
) -> str:
    """Return the reason why ``mode`` was not chosen; empty where its ``cost`` is the ``best``."""
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
    order = order_of(objective)
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
