"""The trainer's planner in simulated time: the client's own controller over costs that the simulation counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hapi.client.loading.link_stats import Forward, SplitTraffic
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.controller import SplitController
from hapi.client.planning.counts import ClientCounts, Snapshot, SplitCounts, TrafficCounts, Work
from hapi.profiler.fit import Sizes, Tier
from hapi.profiler.profile import Job, Profile
from hapi.wire.report import RequestReport

RECENT = 16
"""Answers among which every server that shares the requests has one, as for the client's own meter."""


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

    def answered(self, split: int, samples: int, nbytes: float, report: RequestReport, began: float) -> None:
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
        traffic.bytes_received += round(nbytes)
        self._tiers[split] = Tier(**vars(report.tier))
        self._answered = [*self._answered, report.server][-RECENT:]

    def batch(self, split: int, samples: int, suffix: float, step: float, received: float) -> None:
        """Count a batch that was trained.

        Args:
            split: of the batch.
            samples: in it.
            suffix: seconds in its frozen layers.
            step: seconds in its trained ones.
            received: CPU seconds of receiving it.
        """
        more = ClientCounts(
            batches=1,
            samples=samples,
            process_cpu=suffix + step + received,
            main_cpu=suffix + step,
            suffix=Work(samples, suffix),
            step=Work(samples, step),
        )
        self._own[split] = self._own.get(split, ClientCounts()).plus(more)

    def take_forwards(self) -> Sequence[Forward]:
        """Return nothing: only profiling needs it, and a simulated trainer has a profile."""
        return ()

    def snapshot(self) -> Snapshot:
        """Return all sums so far, by split."""
        found = {
            split: SplitCounts(traffic=TrafficCounts.of(traffic)) for split, traffic in self._traffic.items()
        }
        for split, own in self._own.items():
            found[split] = replace(found.get(split, SplitCounts()), client=own)
        return found


class Splits(Protocol):
    """Source of the splits of a trainer's batches."""

    @property
    def changes(self) -> int:
        """Times that the split has changed."""

    def open(self, batch: int) -> int:
        """Return the split of batch number ``batch``, which opens."""

    def done(self, batch: int, split: int, nbytes: float, seconds: float) -> None:
        """Note that a batch was trained; since the last one ``nbytes`` came in ``seconds`` of the link."""


class FixedSplits:
    """One split for all batches."""

    changes = 0

    def __init__(self, split: int) -> None:
        """Take ``split``."""
        self._split = split

    def open(self, batch: int) -> int:
        """Return the only split."""
        return self._split

    def done(self, batch: int, split: int, nbytes: float, seconds: float) -> None:
        """Do nothing."""
        return


class PlannedSplits:
    """Splits that :class:`SplitController` chooses, from a profile of the idle fleet and from what it observes."""

    def __init__(
        self,
        profile: Profile,
        job: Job,
        meter: SimulatedMeter,
        *,
        hysteresis: float | None = None,
        holds: bool = True,
        smoothing: float = 1.0,
        chance: Callable[[], float] = lambda: 0.0,
        follow: float = 1.0,
    ) -> None:
        """Choose the first split now.

        Args:
            profile: of the servers together, see :func:`hapi.cluster.simulation.costs.together`.
            job: the training.
            meter: counts the batches' costs.
            hysteresis: part of an epoch's seconds that another split must gain; None: the client's own.
            holds: keep a split for some batches, longer if it changes often.
            smoothing: weight of the newest batch in the link's rate that the planner sees; 1: the rate as it is.
            chance: returns a number from 0 to 1 when a change is due.
            follow: chance with which one is taken up at once, batch by batch.
        """
        first, longest = (ChangeHold.FIRST, ChangeHold.LONGEST) if holds else (0, 0)
        may = None if follow >= 1 else lambda: chance() < follow
        hold = ChangeHold(first, longest, hysteresis=hysteresis, may=may)
        self._controller = SplitController("auto", sizes_of(profile), job, meter, profile=profile, hold=hold)
        self._smoothing, self._pace = smoothing, 0.0

    @property
    def changes(self) -> int:
        """Times that the split has changed since the first choice."""
        return max(0, len(self._controller.changes) - 1)

    def open(self, batch: int) -> int:
        """Return the controller's split."""
        split, _ = self._controller.open(0, batch)
        return split

    def done(self, batch: int, split: int, nbytes: float, seconds: float) -> None:
        """Tell the controller, which may choose another split."""
        rates = []
        if nbytes > 0 and seconds > 0:
            newest = seconds / nbytes
            self._pace = newest if not self._pace else self._pace + self._smoothing * (newest - self._pace)
            rates = [(round(nbytes), self._pace * nbytes)]
        self._controller.batch_done(0, batch, split, rates)


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
