"""Costs of a job by the number of its epochs, for each way to keep something. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Mode
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import Objective, Prices, ReuseFacts

_MOST_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class Course:
    """The best choice of one mode, for jobs of more and more epochs."""

    mode: Mode
    epochs: tuple[int, ...]
    """Epochs of each job, ascending."""
    seconds: tuple[float, ...]
    """Seconds of the whole job."""
    money: tuple[float, ...]


def courses(
    profile: Profile, job: Job, facts: ReuseFacts, prices: Prices, objective: Objective
) -> tuple[Course, ...]:
    """Return the costs of each possible mode for jobs of 1 to ``job.epochs`` epochs; arguments as for
    :func:`hapi.profiler.reuse.choose.choose_reuse`.
    """
    counts = epoch_counts(job.epochs)
    points: dict[Mode, list[tuple[float, float]]] = {}
    for epochs in counts:
        found = choose_reuse(profile, replace(job, epochs=epochs), facts, prices=prices, objective=objective)
        for one in found.candidates:
            if one.cost is not None:
                points.setdefault(one.mode, []).append((one.cost.seconds, one.cost.money))
    return tuple(
        Course(
            mode=mode,
            epochs=counts,
            seconds=tuple(seconds for seconds, _ in found),
            money=tuple(money for _, money in found),
        )
        for mode, found in points.items()
    )


def epoch_counts(largest: int) -> tuple[int, ...]:
    """Return numbers of epochs from 1 to ``largest``, the few in closer steps."""
    if largest <= _MOST_POINTS:
        return tuple(range(1, largest + 1))
    steps = range(_MOST_POINTS)
    return tuple(sorted({round(largest ** (step / (_MOST_POINTS - 1))) for step in steps}))
