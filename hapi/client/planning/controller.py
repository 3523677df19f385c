"""The split of each training batch: fixed, or profiled, decided and watched while training runs.

States of a planned run::

    profiling -> decided    batches run at the splits of the schedule, in its order: HAPI's Algorithm 1 takes the freeze
                            for the first half of epoch 0 and the smallest split that fits for the second; ``auto``
                            lets that one alternate with the split from the freeze on that sends least, until both have
                            shown enough; the oracle takes every split. Then the strategy decides.
    decided   -> decided    the watch found that the measured stages have left the estimate, planned anew, and the new
                            split is better by more than the hysteresis
    decided   -> profiling  at the beginning of another profiling epoch

Decided may be one split, or two that alternate (:mod:`hapi.profiler.stages.alternation`). A split that sends too little
to show the link is left for a batch now and then, where a faster link would be of use: else it would never be noticed.

In every state a batch that did not fit this side's memory raises the smallest split, and one that a server has no
memory for lowers the largest. Nothing of this changes what is trained: only where frozen layers run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hapi.client.planning import plan_records as records
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.counts import CostMeter
from hapi.client.planning.drift import DriftDetector
from hapi.client.planning.link_probe import LinkProbe
from hapi.client.planning.plan_records import OtherDeviceError, fitted
from hapi.client.planning.profile_phase import Profiling, schedule
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.client.planning.split_range import SplitRange, first_that_fits, late_split, received_ahead
from hapi.client.settings import ORACLE
from hapi.profiler.change import Change
from hapi.profiler.fit import Arrivals, Sizes
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choose import ReusePlan
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.strategies import Plan, plan, seconds_at


class SplitController:
    """Chooses a split for every batch that opens, and learns from every batch that is done.

    :meth:`open` may be called from any thread; all else is the training loop's.
    """

    def __init__(
        self,
        strategy: str,
        sizes: Sizes,
        job: Job,
        meter: CostMeter,
        *,
        replan: bool = True,
        profile_epochs: Sequence[int] = (0,),
        profile_batches: int | None = None,
        profile: Profile | None = None,
        reuse: ReuseChooser | None = None,
        hold: ChangeHold | None = None,
    ) -> None:
        """``profile``: decide from it at once. ``reuse``: chooses what is kept, and with ``auto`` the split too.

        Raises :class:`DeviceMemoryError` when no split fits the memory, or none that the strategy considers.
        """
        self.strategy = strategy
        self.sizes = sizes
        self.job = job
        self.changes: list[Change] = []
        self.earlier_changes = 0  # made by processes before this one
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.measured: dict[int, float] = {}
        """The oracle's seconds a batch, by split."""
        self.chooser = reuse
        self._meter = meter
        self._replan = replan and strategy != ORACLE
        self._profile_epochs = frozenset(profile_epochs)
        self._profile_batches = profile_batches
        self._profiled: set[int] = set()
        """Epochs whose profiling is over."""
        self._lock = threading.Lock()
        self.weights_from = first_that_fits(sizes, job)
        """No batch is ever split before this layer: what its weights take counts at every split."""
        self.job = job = replace(job, weights_from=self.weights_from)
        self._range = SplitRange(self.weights_from, sizes.last_split)
        self._late = late_split(strategy, sizes, job, self.weights_from)
        """The later of the two splits that are profiled."""
        self.at = Alternation.only(self._late)
        """Split or splits of batches that are not for profiling."""
        self._opened = 0
        """Batches that have opened at it."""
        self._profiling = Profiling(meter, sizes)
        self._unopened_change = False
        """True when no batch has opened since the last change."""
        self._last_done = 0.0
        self._watch: DriftDetector | None = None
        self._why: str | None = None  # the watch's newest finding, until the plan has been followed
        self._hold = hold or ChangeHold()
        self._worse = False
        """True when the split has turned out to be slower than by the plan."""
        self._probe = LinkProbe()
        self._probes: list[int] = []
        """Splits of batches to come that show the link."""
        self.probes = 0
        """Batches that were run to see the link."""
        if profile is not None:
            self._profiled.add(0)
            self._adopt(fitted(profile, sizes), (0, 0), records.given_words(profile))

    # -- asked by the window -----------------------------------------------------------------------------

    def open(self, epoch: int, batch: int) -> tuple[int, bool]:
        """Return (split, whether its layers are timed) of a batch that opens."""
        with self._lock:
            if self._profiling.left:
                split, timed = self._profiling.open()
                return self._range.nearest(split), timed
            if self._probes:
                self.probes += 1
                return self._range.nearest(self._probes.pop()), False
            if self._unopened_change:
                self._unopened_change = False
                self.changes[-1] = replace(self.changes[-1], epoch=epoch, batch=batch)
            self._opened += 1
            return self.at.split_of(self._opened - 1), False

    @property
    def upcoming(self) -> int | None:
        """The split that is expected after that of the batches that open now; None if none is known yet."""
        with self._lock:
            following, at = self._profiling.following, self.at
        if following is not None:
            return self._range.nearest(following)
        return at.other if at.share else self._hold.delayed

    def may_open(self, live: int) -> bool:
        """Return whether a batch may open beside ``live`` others: a profile that ends early has few ahead of it."""
        return self._profiling.may_open(live, self.job)

    # -- told by the training loop -----------------------------------------------------------------------

    @property
    def split(self) -> int:
        """Split of batches that are not for profiling, or of most of them."""
        return self.at.split

    @property
    def profiling(self) -> bool:
        """True when profiling batches are under way or to come."""
        return self._profiling.left or self._profiling.under_way

    def begin_pass(self, epoch: int, batches: int, *, profiles: bool = True) -> None:
        """Begin an epoch of ``batches``, or the rest of it; profiling that does not fit it goes on later, and is left
        out without ``profiles``: the plan then comes by :meth:`restore`.
        """
        self._last_done = time.monotonic()
        self._reopen()
        due = (epoch in self._profile_epochs and epoch not in self._profiled) or self.plan is None
        if profiles and due and not self._profiling.left:
            may_end_early = self.strategy == "auto" and self._profile_batches is None
            with self._lock:
                self._profiling.begin(
                    schedule(self.strategy, self._late, self._range.splits, batches, self._profile_batches),
                    may_end_early=may_end_early,
                    mixed=may_end_early and self.job.alternate and not self.sizes.one_machine,
                )
        if self._watch is not None:
            self._watch.restart()
        if self.profile is not None and not self.profiling and self._choose_reuse(epoch) and self.reuse:
            self._why = self._why or self.reuse.reason
            self._follow_plan((epoch, 0))

    @property
    def reuse(self) -> ReusePlan | None:
        """The choice of what is kept; None before there is a profile, and where nothing can be kept."""
        return None if self.chooser is None else self.chooser.plan

    def _choose_reuse(self, epoch: int) -> bool:
        """Choose what is kept in the epochs from ``epoch`` on; whether that is something else than before."""
        if self.chooser is None or self.profile is None or self.plan is None:
            return False
        job = replace(self.job, epochs=max(1, self.job.epochs - epoch))
        return self.chooser.choose(self.profile, job, self._range.candidates(self.plan))

    def _best(self) -> Alternation:
        """Split or splits of batches by the present plan."""
        return self.at if self.plan is None else self._range.decided(self.plan, self.reuse)

    def _reopen(self) -> None:
        """Schedule batches again that had opened when a pass was left in its middle."""
        with self._lock:
            self._profiling.reopen()

    def batch_done(self, epoch: int, batch: int, split: int, rates: Arrivals, bounds: Arrivals = ()) -> None:
        """Note that batch number ``batch`` was trained, and plan again if its stages have left the estimate.

        ``rates`` has (bytes, seconds) of arrivals since the last one, ``bounds`` upper bounds of the seconds of others.
        """
        now = time.monotonic()
        seconds, self._last_done = now - self._last_done, now
        self._hold.batch_done()
        if self._profiling.under_way:
            self._profiling.note(split, seconds, rates)
            with self._lock:
                self._profiling.done()
            if not self.profiling:
                self._decide(epoch, batch)
        elif self._watch is not None and self._replan:
            found = self._watch.batch_done(split, rates, bounds)
            if found is not None:
                before = self._seconds(self.at)
                self.profile, self._why = found
                self.plan = plan(self.strategy, self.profile, self.job)
                self._choose_reuse(epoch)
                self._worse = self._seconds(self.at) > (1 + self._hold.hysteresis) * before
            self._follow_plan((epoch, batch + 1))
            self._probe_link(split, rates, bounds)

    def batch_passed(self) -> None:
        """Note that a batch was trained whose features were all kept: it tells nothing of any split."""
        self._last_done = time.monotonic()

    def failed(self, epoch: int, batch: int, split: int) -> bool:
        """Handle a batch at ``split`` that did not fit this side's memory; False if none will."""
        if not self._range.drop_up_to(split):
            return False
        self._keep_within((epoch, batch), split, f"out of memory at split {split}")
        return True

    def movable(self, split: int) -> bool:
        """Return whether a smaller split than ``split`` fits this side's memory; from any thread."""
        return split > self._range.min_split

    def refused(self, epoch: int, batch: int, split: int) -> bool:
        """Handle a batch at ``split`` that no server has memory for; False if it is so for any that fits this
        side's.
        """
        if not self._range.drop_from(split):
            return False
        self._keep_within((epoch, batch), split, f"a server has no memory for split {split}")
        return True

    def _keep_within(self, at: tuple[int, int], split: int, why: str) -> None:
        """The bounds have moved past ``split``: leave what lies outside of them."""
        self._reopen()
        if self._profiling.left:
            nearest = self._range.nearest(split)
            why += f", profiling goes on from split {nearest}"
            self.changes.append(Change(epoch=at[0], batch=at[1], before=split, after=nearest, why=why))
            with self._lock:
                self.at = Alternation.only(self._range.nearest(self.at.split))
        elif self.at.split not in self._range or self.at.other not in self._range:
            self._choose_reuse(at[0])
            self._change(at, self._range.allowed(self._best()), why)

    @property
    def received_ahead(self) -> int:
        """Bytes of batches that may be on this side at once."""
        return received_ahead(self.sizes, self.job, self._range.min_split)

    # -- deciding ----------------------------------------------------------------------------------------

    def _decide(self, epoch: int, batch: int) -> None:
        self._profiled.add(epoch)
        if self.strategy == ORACLE:
            self.measured = self._profiling.seconds()
        self._adopt(self._profiling.profile(), (epoch, batch + 1), "profiled")

    def _adopt(
        self, profile: Profile, at: tuple[int, int], why: str, decided: Alternation | None = None
    ) -> None:
        """Plan from ``profile``, unless it is ``decided`` already."""
        self.profile = profile
        self.plan = plan("auto" if self.strategy == ORACLE else self.strategy, profile, self.job)
        self._choose_reuse(at[0])
        tried = {s: seconds for s, seconds in self.measured.items() if s in self._range}
        if decided is None and self.strategy == ORACLE:
            decided = Alternation.only(min(tried, key=lambda s: tried[s]) if tried else self._best().split)
        self._change(at, self._best() if decided is None else self._range.allowed(decided), why)
        self._watch = None
        if self._replan:
            self._watch = DriftDetector(
                self._meter, self.sizes.client, profile, self.job.bs, self._encoding_seconds
            )
        self._why = None

    def _encoding_seconds(self, split: int) -> float:
        """Seconds in which a server encodes a sample of ``split`` for the wire, as far as is known."""
        return 0.0 if self.chooser is None else self.chooser.encoding_seconds(split)

    def _follow_plan(self, at: tuple[int, int]) -> None:
        """Change to what the watch made the plan, for a gain beyond the hysteresis.

        That is when the hold is over, or at once where the split turned out slower than by its plan.
        """
        if self.plan is None or self._why is None:
            return
        after = self._best()
        now = self._seconds(self.at)
        gain = 1 - self._seconds(after) / now if now > 0 else 0.0
        if after == self.at or gain <= self._hold.hysteresis:
            self._why, self._worse = None, False
        elif self._hold.allows(after.split, at_once=self._worse):
            self._hold.begin()
            self._worse = False
            self._change(at, after, f"{self._why}; {gain:.0%} faster by estimate")
            self._why = None

    def _seconds(self, at: Alternation) -> float:
        """Seconds of an epoch at ``at``, by the plan; with a choice of what is kept those of all that follow."""
        of_job = None if self.chooser is None else self.chooser.seconds_at(at)
        if of_job is not None:
            return of_job
        return 0.0 if self.profile is None else seconds_at(self.profile, self.job, at)

    def _probe_link(self, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Let the next batch show the link if it was not seen for long and a faster one would be of use."""
        if self.profile is None:
            return
        profile = self.profile

        def choose() -> int | None:
            return self._probe.split(self.strategy, profile, self.job, self._range, self.at)

        probe = self._probe.batch_done(split, rates, bounds, profile.link.bits_per_second, choose)
        if probe is not None:
            with self._lock:
                self._probes = [probe]

    def _change(self, at: tuple[int, int], after: Alternation, why: str) -> None:
        with self._lock:
            if after != self.at or len(self.changes) == self.earlier_changes:
                why = f"{why}; {after.text}" if after.text else why
                before = self.at.split
                self.changes.append(
                    Change(epoch=at[0], batch=at[1], before=before, after=after.split, why=why)
                )
                self._unopened_change = True
                self._probes.clear()
                self._probe.restart()
                self._opened = 0
            self.at = after

    # -- for the report and the checkpoint ---------------------------------------------------------------

    def estimated_seconds(self, epoch: int, samples: int) -> float | None:
        """Seconds of ``epoch``, of ``samples``, at the present split; None before there is a plan."""
        kept = None if self.chooser is None else self.chooser.epoch_seconds(samples, epoch)
        if kept is not None or self.profile is None:
            return kept
        return seconds_at(self.profile, replace(self.job, samples=samples), self.at)

    def to_json(self) -> dict[str, Any]:
        """Return the plan with every candidate, and the changes."""
        document = records.plan_document(self.strategy, self.at, self.job, self.profile, self.plan)
        document |= {"changes": [change.to_json() for change in self.changes], "looks": self.probes}
        if self.chooser is not None and (kept := self.chooser.to_json()) is not None:
            document["reuse"] = kept
        if self.measured:
            document["measured_batch_seconds"] = {str(s): round(t, 6) for s, t in self.measured.items()}
        return document

    def state(self) -> dict[str, Any] | None:
        """State for a resumed run; None while there is no plan."""
        if self.profile is None:
            return None
        return {
            "strategy": self.strategy,
            **records.at_document(self.at),
            "min_split": self._range.min_split,
            "max_split": self._range.max_split,
            "profiled": sorted(self._profiled),
            "profile": self.profile.to_json(),
            "changes": [change.to_json() for change in self.changes],
            "looks": self.probes,
        }

    def restore(self, state: Any, epoch: int, batch: int) -> None:
        """Go on with :meth:`state`'s plan instead of profiling anew; another strategy decides from its profile.

        ValueError, KeyError, TypeError or ConfigError for anything else.
        """
        if state is None:
            return
        kept, min_split, max_split, profiled = records.kept_splits(state, self.sizes.last_split)
        try:
            profile = fitted(Profile.from_json(state["profile"]), self.sizes)
        except OtherDeviceError:
            return  # it is profiled anew
        self._range.narrow(min_split, max_split)
        self._profiled.update(profiled)
        self.changes, self.probes = [Change.from_json(c) for c in state["changes"]], int(state["looks"])
        self.earlier_changes = len(self.changes)
        decided = kept if state["strategy"] == self.strategy else None
        self._adopt(profile, (epoch, batch), "from the checkpoint", decided)
