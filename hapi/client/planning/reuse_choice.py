"""Choice of what a run keeps: made with its first profile, and remade as costs and the cache's contents change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.choose import ReusePlan, choose_reuse
from hapi.profiler.reuse.facts import RAW, CutCodecs, KeptShare, Objective, Prices, ReuseFacts
from hapi.profiler.reuse.job_cost import JobCost, JobPricer
from hapi.profiler.stages.alternation import Alternation

HYSTERESIS = 0.05
"""Part of what is left of the job that another choice must save to be taken."""
SAME_RATE = 0.1
"""Part by which a measured rate may differ from that of the last choice without another one being looked for: rates
of a disk and of codecs move with every pass that uses them."""


def nearly_equal(one: Any, other: Any) -> bool:
    """Return whether facts are the same, but for rates and ratios that differ by no more than :data:`SAME_RATE`."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= SAME_RATE * max(abs(one), abs(other))
    if isinstance(one, Profile | KeptShare) or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if dataclasses.is_dataclass(one):
        return all(
            nearly_equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    return bool(one == other)


class ReuseChooser:
    """Holds the choice of what a run keeps. Not thread-safe, but :attr:`plan` may be read from any thread."""

    def __init__(
        self,
        facts: Callable[[], ReuseFacts],
        *,
        objective: Objective = "time",
        prices: Prices | None = None,
        always: bool = False,
        wire_codecs: Callable[[], tuple[CutCodecs, ...]] = tuple,
        kept_for: Callable[[int], tuple[KeptShare, ...]] | None = None,
    ) -> None:
        """Choose by ``facts()``, which tells the room, and the shares that are kept by now.

        Args:
            facts: told anew for each choice.
            objective: time or money.
            prices: for money.
            always: keep features in any case.
            wire_codecs: those that are on, told anew each time.
            kept_for: tells what an epoch finds here, where that differs from one to the next.
        """
        self._always, self._wire_codecs, self._kept_for = always, wire_codecs, kept_for
        self._facts, self._objective, self._prices = facts, objective, prices or Prices()
        self.plan: ReusePlan | None = None
        """The choice; None before there is a profile."""
        self._last: ReuseFacts | None = None
        self._chosen_by: ReuseFacts | None = None
        """The facts that the choice was made from."""
        self._profile: Profile | None = None
        self._grounds: tuple[Profile, ReuseFacts, tuple[int, ...]] | None = None
        """Profile, facts and splits of the last choice."""
        self._job: Job | None = None

    def choose(self, profile: Profile, job: Job, splits: Sequence[int]) -> bool:
        """Choose, or keep to the former choice where another one gains less than the hysteresis.

        Args:
            profile: the present measurements.
            job: the training, with the epochs to come.
            splits: those that may be taken.

        Returns:
            True when the choice is another one than before.
        """
        facts = self._facts()
        before, grounds = self.plan, (profile, facts, tuple(splits))
        self._last, self._profile, self._job = facts, profile, job
        # What is worth its while for more epochs is so for fewer, unless something else has changed.
        if before is not None and nearly_equal(self._grounds, grounds):
            return False
        self._grounds = grounds
        found = choose_reuse(
            profile,
            job,
            facts,
            prices=self._prices,
            objective=self._objective,
            splits=splits,
            always=self._always,
        )
        if before is not None and before.choice.within(splits) and self._possible(before.choice, facts):
            now = JobPricer(profile, job, facts, before.choice.unchanging).job_cost(self._prices)
            if self._aim(found.cost) > (1 - HYSTERESIS) * self._aim(now):
                self.plan = replace(before, cost=now)
                return False
        self.plan, self._chosen_by = found, facts
        return before is None or before.choice != found.choice

    def _aim(self, cost: JobCost) -> float:
        return cost.money if self._objective == "money" else cost.seconds

    @staticmethod
    def _possible(choice: Choice, facts: ReuseFacts) -> bool:
        if choice.mode == "keep samples":
            return facts.client is not None and not facts.samples_refused
        if choice.mode == "keep there":
            return facts.server is not None and not facts.refused
        return choice.mode == "recompute" or (facts.client is not None and not facts.refused)

    def seconds_at(self, at: Alternation) -> float | None:
        """Return the seconds of what is left of the job by the present choice, but with batches at the split of ``at``.

        None before there is a choice; infinite for splits that do not go with what is kept.
        """
        if self.plan is None or self._profile is None or self._job is None or self._last is None:
            return None
        choice, last = self.plan.choice.unchanging, self._last
        if choice.mode in ("keep samples", "keep there") and at != Alternation.only(choice.crossing.split):
            choice = Choice(mode="recompute", cut=0, crossing=Crossing(split=at.split))
        elif choice.mode == "keep here" and max(at.split, at.other) > choice.cut:
            return float("inf")
        wire, other = (
            choice.crossing.wire_of(split) or last.wire_at(split)[0] for split in (at.split, at.other)
        )
        alternation = at if at.share else None
        choice = choice.at(Crossing(split=at.split, wire=wire, alternation=alternation, other_wire=other))
        return JobPricer(self._profile, self._job, self._last, choice).job_cost(self._prices).seconds

    def encoding_seconds(self, split: int) -> float:
        """Return the seconds in which a server encodes a sample of ``split`` by the codec that is on."""
        codec = ReuseFacts(wire_codecs=self._wire_codecs()).wire_at(split)[0]
        if codec.name == RAW.name or self._profile is None:
            return 0.0
        return self._profile.sent_bytes(split) / codec.encode

    def epoch_seconds(self, samples: int, epoch: int) -> float | None:
        """Return the seconds of ``epoch``, of ``samples``, by the present choice with what is kept now.

        None before there is a choice. That the cache fills meanwhile is in it.
        """
        if self.plan is None or self._profile is None or self._job is None:
            return None
        job = replace(self._job, samples=samples, epochs=1)
        facts = self._facts()
        facts = replace(facts, samples=facts.samples or self._job.samples * facts.views)
        if self._kept_for is not None:
            facts = replace(facts, client_kept=self._kept_for(epoch))
        return (
            JobPricer(self._profile, job, facts, self.plan.choice.unchanging).job_cost(self._prices).seconds
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return the choice with its alternatives and the facts it was made from; None before there is one."""
        if self.plan is None or self._chosen_by is None:
            return None
        prices = dataclasses.asdict(self._prices)
        return {**self.plan.to_json(), "facts": self._chosen_by.to_json(), "prices": prices}
