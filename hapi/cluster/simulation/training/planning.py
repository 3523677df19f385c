"""The trainer's planner in simulated time: the client's own controller over costs that the simulation counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from hapi.client.loading.link_stats import Forward, SplitTraffic
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.controller import SplitController
from hapi.client.planning.counts import ClientCounts, Snapshot, SplitCounts, TrafficCounts, Work
from hapi.profiler.fit import Arrivals, Sizes, Tier
from hapi.profiler.profile import Job, Profile
from hapi.profiler.stages.crowd import with_waits
from hapi.wire.report import RequestReport

RECENT = 16
"""Answers among which every server that shares the requests has one, as for the client's own meter."""


class BatchCost(NamedTuple):
    """Cost of a batch that was trained."""

    number: int
    split: int
    samples: int
    suffix: float
    """Seconds in its frozen layers."""
    step: float
    """Seconds in its trained ones."""
    received: float
    """CPU seconds of receiving it."""


class SimulatedMeter:
    """Counts what batches cost, as :class:`hapi.client.planning.meter.Meter` does."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._own: dict[int, ClientCounts] = {}
        self._traffic: dict[int, SplitTraffic] = {}
        self._answered: list[str] = []
        self._tiers: dict[int, Tier] = {}

    @property
    def servers(self) -> Mapping[int, Tier]:
        """Resources of the servers of each split."""
        count = max(1, len(set(self._answered)))
        return {split: replace(tier, count=count) for split, tier in self._tiers.items()}

    def answered(self, split: int, samples: int, nbytes: int, report: RequestReport, began: float) -> None:
        """Count an answered request.

        Args:
            split: of the request.
            samples: that it asked for.
            nbytes: of its frames.
            report: the server's.
            began: seconds until its first frame came.
        """
        traffic = self._traffic.setdefault(split, SplitTraffic())
        traffic.add(samples, report, began)
        traffic.bytes_received += nbytes
        self._tiers[split] = Tier(**vars(report.tier))
        self._answered = [*self._answered, report.server][-RECENT:]

    def batch(self, cost: BatchCost) -> None:
        """Count a batch that was trained."""
        more = ClientCounts(
            batches=1,
            samples=cost.samples,
            process_cpu=cost.suffix + cost.step + cost.received,
            main_cpu=cost.suffix + cost.step,
            suffix=Work(cost.samples, cost.suffix),
            step=Work(cost.samples, cost.step),
        )
        self._own[cost.split] = self._own.get(cost.split, ClientCounts()).plus(more)

    def take_forwards(self) -> Sequence[Forward]:
        """Return nothing: only profiling needs it, and a simulated trainer has a profile."""
        return ()

    def snapshot(self, split: int | None = None) -> Snapshot:
        """Return all sums so far, by split; or those of ``split`` alone, if it has any."""
        counted = self._traffic.keys() | self._own.keys()
        return {s: self._counts(s) for s in (counted if split is None else counted & {split})}

    def _counts(self, split: int) -> SplitCounts:
        traffic, own = self._traffic.get(split), self._own.get(split, ClientCounts())
        if traffic is None:
            return SplitCounts(client=own)
        return SplitCounts(client=own, traffic=TrafficCounts.of(_apart(traffic)))


class Splits(Protocol):
    """Source of the splits of a trainer's batches."""

    @property
    def changes(self) -> int:
        """Times that the split has changed."""

    def begin(self, waits: Sequence[float]) -> None:
        """Make the first plan.

        Args:
            waits: seconds that each request would wait, as the servers tell it when the trainer connects.
        """

    def open(self, batch: int) -> int:
        """Return the split of batch number ``batch``, which opens."""

    def answered(self, split: int, samples: int, nbytes: int, report: RequestReport, began: float) -> None:
        """Count an answered request, as :meth:`SimulatedMeter.answered` does."""

    def done(self, cost: BatchCost, rates: Arrivals, bounds: Arrivals) -> None:
        """Note that a batch was trained.

        Args:
            cost: of the batch.
            rates: (bytes, seconds) of arrivals since the last one.
            bounds: upper bounds of the seconds of others.
        """


class FixedSplits:
    """One split for all batches."""

    changes = 0

    def __init__(self, split: int) -> None:
        """Take ``split``."""
        self._split = split

    def begin(self, waits: Sequence[float]) -> None:
        """Do nothing."""

    def open(self, batch: int) -> int:
        """Return the only split."""
        return self._split

    def answered(self, split: int, samples: int, nbytes: int, report: RequestReport, began: float) -> None:
        """Do nothing."""

    def done(self, cost: BatchCost, rates: Arrivals, bounds: Arrivals) -> None:
        """Do nothing."""


class PlannedSplits:
    """Splits that :class:`SplitController` chooses, from a profile of the idle fleet and from what it observes."""

    def __init__(
        self,
        profile: Profile,
        job: Job,
        *,
        hysteresis: float | None = None,
        holds: bool = True,
        smoothing: float = 1.0,
        chance: Callable[[], float] = lambda: 0.0,
        follow: float = 1.0,
    ) -> None:
        """Choose the first split later.

        Args:
            profile: of the servers together, see :func:`hapi.cluster.simulation.costs.together`.
            job: the training.
            hysteresis: part of an epoch's seconds that another split must gain; None: the client's own.
            holds: keep a split for some batches, longer if it changes often.
            smoothing: weight of the newest batch in the link's rate that the planner sees; 1: the rate as it is.
            chance: returns a number from 0 to 1 when a change is due.
            follow: chance with which one is taken up at once, batch by batch.
        """
        first, longest = (ChangeHold.FIRST, ChangeHold.LONGEST) if holds else (0, 0)
        may = None if follow >= 1 else lambda: chance() < follow
        hold = ChangeHold(first, longest, hysteresis=hysteresis, may=may)
        self._meter, self._hold = SimulatedMeter(), hold
        self._profile, self._job = profile, job
        self._smoothing, self._pace = smoothing, 0.0
        self._begun: SplitController | None = None

    @property
    def changes(self) -> int:
        """Times that the split has changed since the first choice."""
        return 0 if self._begun is None else max(0, len(self._begun.changes) - 1)

    @property
    def _controller(self) -> SplitController:
        if self._begun is None:
            raise RuntimeError("a trainer plans when it begins")
        return self._begun

    def begin(self, waits: Sequence[float]) -> None:
        """Choose the first split by what the servers tell, as the client does."""
        given = with_waits(self._profile, self._job, waits)
        self._begun = SplitController(
            "auto", sizes_of(given), self._job, self._meter, profile=given, hold=self._hold
        )

    def open(self, batch: int) -> int:
        """Return the controller's split."""
        split, _ = self._controller.open(0, batch)
        return split

    def answered(self, split: int, samples: int, nbytes: int, report: RequestReport, began: float) -> None:
        """Count it for the controller."""
        self._meter.answered(split, samples, nbytes, report, began)

    def done(self, cost: BatchCost, rates: Arrivals, bounds: Arrivals) -> None:
        """Tell the controller, which may choose another split."""
        self._meter.batch(cost)
        nbytes, seconds = sum(n for n, _ in rates), sum(s for _, s in rates)
        if nbytes > 0 and seconds > 0:
            newest = seconds / nbytes
            self._pace = newest if not self._pace else self._pace + self._smoothing * (newest - self._pace)
            rates = [(n, s * self._pace / newest) for n, s in rates]
        self._controller.batch_done(0, cost.number, cost.split, rates, bounds if self._smoothing == 1 else ())


def _apart(traffic: SplitTraffic) -> SplitTraffic:
    """A copy of the sums that change."""
    apart = copy.copy(traffic)
    apart.server_cpu_seconds = dict(traffic.server_cpu_seconds)
    apart.server_wall_seconds = dict(traffic.server_wall_seconds)
    return apart


def sizes_of(profile: Profile) -> Sizes:
    """Return the facts of a job that its profile has."""
    client = profile.client_tier
    return Sizes(
        model=profile.model,
        freeze=profile.freeze,
        last_split=profile.last_split,
        layers=profile.layers,
        samples=profile.samples,
        client=Tier(device=client.device, processors=client.processors, threads=client.threads),
        optimizer_bytes_per_parameter_byte=profile.optimizer_bytes_per_parameter_byte,
        offloaded_bytes=profile.offloaded_bytes,
    )
