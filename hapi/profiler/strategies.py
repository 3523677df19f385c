"""Strategies for the split: every one as a pure function behind one name.

The static ones (HAPI, section 5.1, competitors) need sizes only: :func:`choose_split`. With a profile all of
them are compared: :func:`plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hapi.errors import DeviceMemoryError, UsageError
from hapi.profiler.cost import Estimate, estimate, largest_batch, pipeline_at
from hapi.profiler.profile import Job, Profile
from hapi.profiler.stages.alternation import Alternating, Alternation, best_alternation

Strategy = Callable[[Sequence[int], int], int]
"""(bytes of one sample after layer 0..L, freeze index) to split index."""


def no_split(output_bytes: Sequence[int], freeze: int) -> int:
    """NoSplit: nothing is pushed down, the stored samples are sent."""
    return 0


def at_freeze(output_bytes: Sequence[int], freeze: int) -> int:
    """@Freeze: everything frozen is pushed down."""
    return freeze


def at_minimum(output_bytes: Sequence[int], freeze: int) -> int:
    """@Min: the layer with the smallest output up to the freeze, the earliest on ties; never 0."""
    if freeze == 0:
        return 0
    return min(range(1, freeze + 1), key=lambda layer: (output_bytes[layer], layer))


STRATEGIES: Mapping[str, Strategy] = {"none": no_split, "freeze": at_freeze, "min": at_minimum}


def choose_split(strategy: str, output_bytes: Sequence[int], freeze: int) -> int:
    """The split that ``strategy`` picks; :class:`UsageError` for an unknown one."""
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown split strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](output_bytes, freeze)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A split that was considered."""

    name: str
    """Name of the last layer on the server; empty for split 0."""
    estimate: Estimate
    fits: bool
    """True when the client's memory budget holds it."""
    rejected: str
    """Reason why it was not chosen; empty for the chosen one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision, with everything it was taken from."""

    strategy: str
    split: int
    candidates: tuple[Candidate, ...]
    """Every candidate split from 0, in order."""
    alternation: Alternation | None = None
    """Two splits whose batches alternate, where that is faster than :attr:`split` alone: with ``auto`` only."""
    epoch_seconds: float
    """Seconds of an epoch by the plan."""

    @property
    def chosen(self) -> Candidate:
        """The candidate at :attr:`split`. A static strategy takes it even where it does not fit."""
        return self.candidates[self.split]


Planner = Callable[[Profile, Job, Sequence[Estimate]], int]
"""(profile, job, the estimates of splits 0..last) to split index."""

_TIE = 1e-9
"""Relative difference below which two estimates are the same but for rounding."""


def auto(profile: Profile, job: Job, estimates: Sequence[Estimate]) -> int:
    """Ours: the shortest epoch with streamed frames among the splits that fit; the earliest on ties.

    The earliest, since it asks the least of the storage side, whose compute is shared among tenants (earlier HAPI
    text, section 4.4). All candidate splits count. Raises :class:`DeviceMemoryError` when nothing fits.
    """
    return _smallest(profile, job, estimates, lambda e: e.epoch_seconds)


def algorithm_one(profile: Profile, job: Job, estimates: Sequence[Estimate]) -> int:
    """HAPI, Algorithm 1: the shortest epoch by ``max(client, server + network)`` among the splits that fit."""
    return _smallest(profile, job, estimates[: profile.freeze + 1], lambda e: e.paper_epoch_seconds)


def neurosurgeon(profile: Profile, job: Job, estimates: Sequence[Estimate]) -> int:
    """NSG: the smallest sum of server, network and client (HAPI, section 5.1); never 0 (section 5.4)."""
    if profile.freeze == 0:
        return 0
    return _smallest(
        profile,
        job,
        estimates[1 : profile.freeze + 1],
        lambda e: e.stages.server_waves + e.stages.network + e.stages.client,
    )


def by_bandwidth(profile: Profile, job: Job, estimates: Sequence[Estimate]) -> int:
    """Earlier HAPI text, section 4.4: the earliest layer below the input's size whose batch crosses in 1 s.

    Sizes only, no memory. The freeze when no layer is so small. (Its listing leaves the loop after the first
    candidate, whatever that one's size; its text says what is meant.)
    """
    sizes, limit = profile.output_bytes(), profile.link.bits_per_second / 8
    small = (
        layer
        for layer in range(1, profile.freeze + 1)
        if sizes[layer] < sizes[0] and sizes[layer] * job.bs < limit
    )
    return next(small, profile.freeze)


def _static(strategy: Strategy) -> Planner:
    return lambda profile, job, estimates: strategy(profile.output_bytes(), profile.freeze)


PLANNERS: Mapping[str, Planner] = {
    "auto": auto,
    "hapi": algorithm_one,
    **{name: _static(strategy) for name, strategy in STRATEGIES.items()},
    "nsg": neurosurgeon,
    "bandwidth": by_bandwidth,
}


def plan(strategy: str, profile: Profile, job: Job) -> Plan:
    """The split that ``strategy`` chooses, with the estimate of every candidate, as ``hapi plan`` prints them::

        profile = hapi.Profile.load("profile.json")  # hapi plan resnet50 --save-profile profile.json
        found = hapi.plan("auto", profile, hapi.Job(bs=256, samples=50_000))
        print(found.split, [candidate.estimate.epoch_seconds for candidate in found.candidates])

    Raises :class:`UsageError` for an unknown strategy, and :class:`DeviceMemoryError` when a strategy that minds
    the memory finds nothing that fits.
    """
    if strategy not in PLANNERS:
        raise UsageError(f"unknown split strategy {strategy!r}; known are {', '.join(PLANNERS)}")
    estimates = _estimates(profile, job)
    split = PLANNERS[strategy](profile, job, estimates)
    names = ["", *(layer.name for layer in profile.layers)]
    candidates = tuple(
        Candidate(
            name=names[e.split],
            estimate=e,
            fits=_fits(job, e),
            rejected=_why_not(strategy, profile, job, e, estimates[split]),
        )
        for e in estimates
    )
    fitting = tuple(c.estimate.split for c in candidates if c.fits)
    alternation = alternation_of(profile, job, fitting) if strategy == "auto" else None
    return Plan(
        strategy=strategy,
        split=split,
        candidates=candidates,
        alternation=alternation,
        epoch_seconds=estimates[split].epoch_seconds
        if alternation is None
        else seconds_at(profile, job, alternation),
    )


@lru_cache(maxsize=32)
def alternation_of(profile: Profile, job: Job, splits: tuple[int, ...]) -> Alternation | None:
    """Return the two of ``splits`` whose batches should alternate; None where one split is as good, or must do."""
    if not job.alternate or len(splits) < 2:
        return None
    found = best_alternation([pipeline_at(profile, job, s) for s in splits], profile.link.bits_per_second)
    return None if found is None else found.alternation


def seconds_at(profile: Profile, job: Job, at: Alternation) -> float:
    """Return the seconds of an epoch whose batches run at ``at``."""
    one, other = (pipeline_at(profile, job, split) for split in (at.split, at.other))
    return Alternating(one, other, at.share).epoch(profile.link.bits_per_second)


def choices(profile: Profile, job: Job) -> dict[str, int | None]:
    """Return the split that every strategy would choose, by name; None where nothing fits the memory."""
    estimates = _estimates(profile, job)
    found: dict[str, int | None] = {}
    for name, planner in PLANNERS.items():
        try:
            found[name] = planner(profile, job, estimates)
        except DeviceMemoryError:
            found[name] = None
    return found


@lru_cache(maxsize=32)
def _estimates(profile: Profile, job: Job) -> Sequence[Estimate]:
    """Estimates of all splits; kept, since simulated trainers begin with equal profiles."""
    return tuple(estimate(profile, job, split) for split in range(profile.last_split + 1))


def _fits(job: Job, candidate: Estimate) -> bool:
    return job.memory_bytes is None or candidate.memory.peak <= job.memory_bytes


def _smallest(
    profile: Profile, job: Job, estimates: Sequence[Estimate], seconds: Callable[[Estimate], float]
) -> int:
    fitting = [e for e in estimates if _fits(job, e)]
    if not fitting:
        last = estimates[-1]
        largest = largest_batch(profile, job, last.split)
        way_out = f"a training batch of {largest} would fit" if largest else "not one sample would fit"
        raise DeviceMemoryError(
            f"no split fits the client's memory of {job.memory_bytes} bytes: split {last.split} needs "
            f"{last.memory.peak} with a training batch of {job.bs}; {way_out} (--bs), or raise --memory"
        )
    limit = min(seconds(e) for e in fitting) * (1 + _TIE)
    return next(e.split for e in fitting if seconds(e) <= limit)


def _why_not(strategy: str, profile: Profile, job: Job, this: Estimate, chosen: Estimate) -> str:
    """Reason why ``this`` was not chosen, in the strategy's own terms."""
    if this.split == chosen.split:
        return ""
    if not _fits(job, this):
        return "does not fit the memory"
    if strategy == "auto":
        return _slower(this.epoch_seconds, chosen.epoch_seconds)
    if this.split > profile.freeze:
        return "after the freeze"
    if strategy == "hapi":
        return _slower(this.paper_epoch_seconds, chosen.paper_epoch_seconds)
    if strategy == "nsg":
        return "never considered" if this.split == 0 else "larger sum"
    if strategy == "bandwidth":
        return _outside_rule(profile, job, this.split, chosen.split)
    return f"{strategy} is split {chosen.split}"


def _slower(seconds: float, best: float) -> str:
    if seconds <= best * (1 + _TIE):
        return "as fast, but asks more of the server"
    return f"{seconds / best - 1:.1%} slower" if best > 0 else "slower"


def _outside_rule(profile: Profile, job: Job, split: int, chosen: int) -> str:
    sizes = profile.output_bytes()
    if split == 0:
        return "pushes nothing down"
    if sizes[split] >= sizes[0]:
        return "not smaller than the input"
    if sizes[split] * job.bs >= profile.link.bits_per_second / 8:
        return "more than 1 s on the network"
    return "later than needed"
