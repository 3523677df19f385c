"""One plan for several ranks: the first one profiles and decides, the others follow between two batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hapi.client.joint.ranks import Ranks
from hapi.client.planning.controller import SplitController
from hapi.client.planning.split_source import Planned
from hapi.profiler.fit import Arrivals


class SharedPlan:
    """Carries the first rank's plan to the others.

    A rank may run a few batches at its own split until it has heard of another one: where frozen layers run changes no
    result.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Begin without a plan."""
        self._ranks = ranks
        self._published: tuple[Any, Any] = (None, None)
        """Profile and splits of the plan that was published last."""
        self._followed = 0
        """Number of the plan that was taken over last."""

    @property
    def leads(self) -> bool:
        """True for the rank that makes the plan."""
        return self._ranks.is_first

    def exchange(self, planning: SplitController, epoch: int, batch: int) -> None:
        """Publish a plan that has changed, or take it over from the step at this position on."""
        if not self.leads:
            number, state = self._ranks.published()
            if number > self._followed:
                self._followed = number
                planning.restore(state, epoch, batch)
        elif planning.profile is not None and self._published != (planning.profile, planning.at):
            self._published = planning.profile, planning.at
            self._ranks.publish(planning.state())


@dataclass(kw_only=True)
class PlannedTogether(Planned):
    """Splits that the first rank's controller chooses."""

    shared: SharedPlan

    def begin(self) -> None:
        """Begin a pass; the first rank alone profiles in it."""
        self.shared.exchange(self.planning, self.epoch, 0)
        self.planning.begin_pass(self.epoch, self.batches, profiles=self.shared.leads)
        self.shared.exchange(self.planning, self.epoch, 0)

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Tell the first rank's controller about its batch, and exchange the plan."""
        if self.shared.leads:
            super().done(number, split, rates, bounds)
        self.shared.exchange(self.planning, self.epoch, number + 1)

    def passed(self) -> None:
        """Let the controller's clock go on, and exchange the plan."""
        super().passed()
        self.shared.exchange(self.planning, self.epoch, 0)
