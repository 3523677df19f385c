"""Which split each training batch is extracted at: fixed, or profiled, decided and watched while training runs.

States of a planned run::

    profiling -> decided    batches run at the splits of the schedule, in its order: HAPI's Algorithm 1 takes the
                            freeze for the first half of epoch 0 and the earliest split that fits for the second;
                            the oracle takes every split. Then the strategy decides.
    decided   -> decided    the watch found that the measured stages have left the estimate, planned anew, and the
                            new split is better by more than the hysteresis
    decided   -> profiling  at the beginning of another profiling epoch

Nothing of this changes what is trained: the split says where frozen layers run, not what comes out of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hapi.client.measuring import Meter, Snapshot, merged, observed_between, tier_of
from hapi.client.memory import MemoryBudget
from hapi.client.settings import TrainSettings
from hapi.client.watch import Watch
from hapi.errors import ConfigError, DeviceMemoryError
from hapi.profiler.cost import estimate, memory
from hapi.profiler.decide import PLANNERS, Plan, plan
from hapi.profiler.observe import Sizes, link_rate, profile_of
from hapi.profiler.profile import Job, Profile
from hapi.profiler.sizes import sizes_of

if TYPE_CHECKING:
    from hapi.client.prepare import Prepared

ORACLE = "oracle"
ORACLE_BATCHES = 3
"""Batches that the oracle runs at each split; the first shows what the pipeline held of the split before."""
STRATEGY_NAMES = (*PLANNERS, ORACLE)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The split changed."""

    epoch: int
    batch: int
    """The first batch that is extracted at the new split."""
    before: int
    after: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "from": self.before,
            "to": self.after,
            "why": self.why,
        }


class Planning:
    """Chooses a split for every batch that opens, and learns from every batch that is done.

    :meth:`open` may be called from any thread; all else is the training loop's.
    """

    def __init__(
        self,
        strategy: str,
        sizes: Sizes,
        job: Job,
        meter: Meter,
        *,
        replan: bool = True,
        profile_epochs: Sequence[int] = (0,),
        profile_batches: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        """``profile``: decide from it at once. Raises :class:`DeviceMemoryError` when no split fits the memory."""
        self.strategy = strategy
        self.sizes = sizes
        self.job = job
        self.changes: list[Change] = []
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.measured: dict[int, float] = {}
        """The oracle's seconds a batch, by split."""
        self._meter = meter
        self._replan = replan
        self._profile_epochs = frozenset(profile_epochs)
        self._profile_batches = profile_batches
        self._lock = threading.Lock()
        self._earliest = self._earliest_that_fits()
        self._split = sizes.freeze
        self._schedule: list[tuple[int, bool]] = []
        """(split, whether its layers are timed) of the profiling batches that have not opened yet."""
        self._awaited = 0
        """Profiling batches that are not done yet."""
        self._before: Snapshot = {}
        """The sums when profiling began."""
        self._begun: dict[int, Snapshot] = {}
        """The sums when each profiled split's first batch was done."""
        self._last_done = 0.0
        self._intervals: dict[int, list[float]] = {}
        self._opened: tuple[int, int] = (0, 0)
        self._watch: Watch | None = None
        self._rates: list[tuple[int, float]] = []
        if profile is not None:
            self._adopt(profile, 0, 0, "from the given profile")

    # -- asked by the window -----------------------------------------------------------------------------

    def open(self, epoch: int, batch: int) -> tuple[int, bool]:
        """(split, whether its layers are timed) of a batch that opens."""
        with self._lock:
            self._opened = (epoch, batch)
            if self._schedule:
                split, timed = self._schedule.pop(0)
                return max(split, self._earliest), timed
            return self._split, False

    # -- told by the training loop -----------------------------------------------------------------------

    @property
    def split(self) -> int:
        """Of what is not a profiling batch."""
        return self._split

    @property
    def profiling(self) -> bool:
        """Whether profiling batches are under way or to come."""
        return self._awaited > 0

    def begin_pass(self, epoch: int, batches: int) -> None:
        """An epoch (or what is left of it) begins."""
        self._last_done = time.monotonic()
        due = epoch in self._profile_epochs or self.plan is None
        if due and not self._awaited:
            with self._lock:
                self._schedule = self._new_schedule(batches)
                self._awaited = len(self._schedule)
            self._before = self._meter.snapshot()
            self._begun.clear()
            self._intervals.clear()
            self._rates.clear()
        if self._watch is not None:
            self._watch.restart()

    def _new_schedule(self, batches: int) -> list[tuple[int, bool]]:
        """The first batch at a split warms up, the second is timed layer by layer, the others as they will run."""
        limit = self._profile_batches
        first = max(1, batches // 2) if limit is None else limit
        second = max(1, batches - first) if limit is None else limit
        parts = [(self.sizes.freeze, first), (self._earliest, second)]
        if self.strategy == ORACLE:
            parts = [(split, ORACLE_BATCHES) for split in range(self._earliest, self.sizes.last_split + 1)]
        return [(split, i == min(1, count - 1)) for split, count in parts for i in range(count)]

    def batch_done(self, epoch: int, batch: int, split: int, rates: list[tuple[int, float]]) -> None:
        """A batch was trained; ``rates``: what the link showed since the last one."""
        now = time.monotonic()
        seconds, self._last_done = now - self._last_done, now
        if self._awaited:
            self._rates += rates
            self._profiled(split, seconds)
            self._awaited -= 1
            if not self._awaited:
                self._decide(epoch, batch)
        elif self._watch is not None and self._replan:
            found = self._watch.batch_done(split, rates)
            if found is not None:
                self._plan_anew(*found)

    def end_pass(self) -> None:
        """The epoch is over; whatever was scheduled and not run comes with the next."""
        with self._lock:
            self._awaited = len(self._schedule)
        if not self._awaited and self.plan is None and self._begun:
            self._decide(*self._opened)

    def failed(self, epoch: int, batch: int, split: int) -> bool:
        """A batch at ``split`` did not fit this side's memory although it should have; False if none will."""
        if split >= self.sizes.freeze:
            return False
        with self._lock:
            self._earliest = max(self._earliest, split + 1)
            later = range(self._earliest, self.sizes.freeze + 1)
            after = self._best_of(later) if self.profile is not None else self._earliest
            self._change(epoch, batch, after, f"out of memory at split {split}")
        return True

    def _best_of(self, splits: Sequence[int]) -> int:
        profile = self.profile
        if profile is None:
            return splits[0]
        return min(splits, key=lambda s: estimate(profile, self.job, s).epoch_seconds)

    # -- deciding ----------------------------------------------------------------------------------------

    def _profiled(self, split: int, seconds: float) -> None:
        self._intervals.setdefault(split, []).append(seconds)
        if split not in self._begun:
            self._begun[split] = self._meter.snapshot()

    def _decide(self, epoch: int, batch: int) -> None:
        profile = self._measured_profile()
        if self.strategy == ORACLE:
            # Only what came after the first batch at a split, when the pipeline held nothing of another.
            self.measured = {s: min(times[1:] or times) for s, times in self._intervals.items()}
        self._adopt(profile, epoch, batch + 1, "profiled")

    def _measured_profile(self) -> Profile:
        after = self._meter.snapshot()
        observed = {}
        for split, begun in self._begun.items():
            # This side's first batch warms it up. What the servers did for later ones may lie before its end.
            warm = begun if len(self._intervals[split]) > 1 else self._before
            found = observed_between(
                merged(self._before, warm), after, self._meter.servers, self.sizes.client
            )
            if split in found:
                observed[split] = found[split]
        link = link_rate(self._rates) or (1e12, 0.0)
        batches = {split: o.batches for split, o in sorted(observed.items())}
        return profile_of(
            self.sizes,
            observed,
            link,
            (f"measured on real requests; batches by split: {batches}",),
        )

    def _adopt(self, profile: Profile, epoch: int, batch: int, why: str) -> None:
        if profile.last_split != self.sizes.last_split or len(profile.layers) != len(self.sizes.layers):
            raise ConfigError(
                f"the profile of {profile.model!r} has {len(profile.layers)} layers up to split {profile.last_split}, "
                f"this job {len(self.sizes.layers)} up to {self.sizes.last_split}; profile this model and freeze"
            )
        self.profile = profile
        if self.strategy == ORACLE:
            self.plan = plan("auto", profile, self.job)
            split = min(self.measured, key=lambda s: self.measured[s]) if self.measured else self.plan.split
        else:
            self.plan = plan(self.strategy, profile, self.job)
            split = self.plan.split
        with self._lock:
            self._schedule.clear()
            self._change(epoch, batch, max(split, min(self._earliest, self.sizes.freeze)), why)
        self._watch = Watch(self._meter, self.sizes.client, profile)

    def _plan_anew(self, profile: Profile, why: str) -> None:
        """The watch's new profile; the split changes only for a gain beyond the hysteresis."""
        if self.strategy == ORACLE:
            return
        found = plan(self.strategy, profile, self.job)
        self.profile, self.plan = profile, found
        gain = 1 - found.chosen.estimate.epoch_seconds / max(
            1e-12, found.candidates[self._split].estimate.epoch_seconds
        )
        if found.split != self._split and gain > Watch.HYSTERESIS and found.split >= self._earliest:
            with self._lock:
                epoch, batch = self._opened
                self._change(epoch, batch + 1, found.split, f"{why}; {gain:.0%} faster by estimate")

    def _change(self, epoch: int, batch: int, split: int, why: str) -> None:
        if split != self._split or not self.changes:
            self.changes.append(Change(epoch=epoch, batch=batch, before=self._split, after=split, why=why))
        self._split = split

    def _earliest_that_fits(self) -> int:
        """Algorithm 1, line 6: the earliest split that is predicted to fit the client's memory."""
        blank = profile_of(self.sizes, {}, (1.0, 0.0))
        if self.job.memory_bytes is None:
            return 0
        for split in range(self.sizes.freeze + 1):
            if memory(blank, self.job, split).peak <= self.job.memory_bytes:
                return split
        plan("auto", blank, self.job)  # tells what would fit
        return self.sizes.freeze

    # -- for the report and the checkpoint ---------------------------------------------------------------

    def estimated_seconds(self, samples: int) -> float | None:
        """Of an epoch of ``samples`` at the present split; None before there is a plan."""
        if self.profile is None:
            return None
        return estimate(self.profile, replace(self.job, samples=samples), self._split).epoch_seconds

    def to_json(self) -> dict[str, Any]:
        """The plan with every candidate, what else would have been chosen, and what changed."""
        document: dict[str, Any] = {
            "strategy": self.strategy,
            "split": self._split,
            "changes": [change.to_json() for change in self.changes],
            "job": asdict(self.job),
        }
        if self.profile is not None and self.plan is not None:
            document["profile"] = self.profile.to_json()
            document["candidates"] = [asdict(candidate) for candidate in self.plan.candidates]
            document["strategies"] = {name: _choice(name, self.profile, self.job) for name in PLANNERS}
        if self.measured:
            document["measured_batch_seconds"] = {str(s): round(t, 6) for s, t in self.measured.items()}
        return document

    def state(self) -> dict[str, Any] | None:
        """What a resumed run goes on with; None while there is no plan."""
        if self.profile is None:
            return None
        return {"split": self._split, "profile": self.profile.to_json()}

    def restore(self, state: Any, epoch: int, batch: int) -> None:
        """Go on with :meth:`state`'s plan instead of profiling anew. ValueError for anything else."""
        if state is None:
            return
        split = state["split"]
        if type(split) is not int or not 0 <= split <= self.sizes.last_split:
            raise ValueError("its split is none of this model")
        self._adopt(Profile.from_json(state["profile"]), epoch, batch, "from the checkpoint")
        self._split = max(split, self._earliest)


def _choice(strategy: str, profile: Profile, job: Job) -> int | None:
    try:
        return plan(strategy, profile, job).split
    except DeviceMemoryError:
        return None


def planning_of(
    settings: TrainSettings, prepared: Prepared, meter: Meter, budget: MemoryBudget
) -> Planning | None:
    """The planning of a session; None when its split is fixed."""
    if prepared.strategy is None:
        return None
    description = prepared.description
    momentum = "momentum" if settings.momentum else "sgd"
    sizes = sizes_of(
        prepared.model,
        settings.model,
        prepared.freeze,
        stored_bytes=description.total_bytes / max(1, description.count),
        encoded=prepared.transforms[0] is not None,
        client=tier_of(prepared.device),
        optimizer=momentum if settings.optimizer == "sgd" else settings.optimizer,
    )
    job = Job(
        bs=settings.bs,
        samples=len(prepared.training_ids),
        epochs=settings.epochs,
        micro_batch=settings.micro_batch,
        request_size=settings.request_size,
        in_flight=settings.in_flight * prepared.servers.size,
        prefetch_bytes=settings.prefetch_bytes,
        memory_bytes=budget.bytes,
    )
    return Planning(
        prepared.strategy,
        sizes,
        job,
        meter,
        replan=settings.replan == "on",
        profile_epochs=settings.profile_epoch,
        profile_batches=settings.profile_batches,
        profile=None if settings.profile is None else Profile.load(settings.profile),
    )
