"""The epoch that a trainer is in: its measurements, and its element of the report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hapi.client.loading.epoch_stats import PassReport
from hapi.client.session import Session
from hapi.profiler.reuse.facts import Prices
from hapi.train.report import Measured, epoch_entry, of_all_ranks


class RunningEpoch:
    """Collects what the running epoch costs, over all processes that train it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.report = PassReport()
        """Counters of the training pass that is under way."""
        self.before = Measured()
        """Measurements of the epoch from before this process resumed it."""
        self.timeline: dict[str, Any] | None = None
        """Path of one batch of the last epoch that had one."""
        self._estimated: float | None = None
        """The plan's seconds for the epoch."""
        self._planned: frozenset[int] = frozenset()
        """Splits that the plan has for it."""
        self._begun = False

    @cached_property
    def batches(self) -> int:
        """Steps of an epoch."""
        return len(self._session.batch_ids(0))

    def stepping(self, epoch: int, first: int) -> None:
        """A batch has arrived: take in the pass's counters and, once an epoch, the plan's estimate.

        Args:
            epoch: number from 0.
            first: the batch that the pass began at.
        """
        self.report = self._session.last
        if not self._begun:  # what the epoch's beginning changed of the split is known by now
            self._estimated, self._begun = self._estimate(epoch, first), True

    def _estimate(self, epoch: int, first: int) -> float | None:
        """The plan's seconds for the epoch that begins; None without a plan, and for a part of an epoch."""
        planning = self._session.planning
        if planning is None or first:
            return None
        self._planned = frozenset((planning.at.split, planning.at.other))
        part = self._session.ranks.part
        return planning.estimated_seconds(
            epoch, sum(len(part(ids)) for ids in self._session.batch_ids(epoch))
        )

    @property
    def measured(self) -> Measured:
        """Measurements of the epoch so far."""
        return self.before + Measured.of(self.report)

    def of_all_ranks(self) -> Measured:
        """Return what all ranks measured of the epoch so far, on each of them."""
        return of_all_ranks(self._session.ranks.gathered(self.measured))

    def go_on(self, before: Measured) -> None:
        """Go on in an epoch of which earlier ranks measured ``before``, which counts once."""
        self.before = before if self._session.ranks.is_first else Measured()

    def finish(self, epoch: int, samples: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the element of the report, and begin anew.

        Args:
            epoch: number from 0.
            samples: samples trained.
            figures: loss, accuracy and other results, by their names in the report.
        """
        measured = self.of_all_ranks()
        entry = epoch_entry(epoch, self._session.split, measured, samples=samples, figures=figures)
        # Of an epoch that ran at one split, as the plan had it; what a profiling epoch takes nobody can know before.
        as_planned = len(measured.splits) == 1 or measured.splits.keys() <= self._planned
        planned = self._estimated if as_planned else None
        entry["estimated_seconds"] = None if planned is None else round(planned, 4)
        entry["keeping"] = self._session.keeping.mode
        prices = self._session.settings.prices
        if prices != Prices():
            spent = prices.of(entry["bytes_received"], entry["server_seconds"], entry["seconds"])
            entry["money"] = round(spent, 6)
        self.timeline = self.report.timeline.to_json() or self.timeline
        self.report, self.before = PassReport(), Measured()
        self._estimated, self._begun = None, False
        return entry
