"""The splits that a run may take: what this side's memory holds, and what has failed since. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.profiler.cost import memory
from hapi.profiler.fit import Sizes, profile_of
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choose import ReusePlan
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.strategies import PLANNERS, Plan, plan


@dataclass
class SplitRange:
    """The candidate splits from ``min_split`` to ``max_split``, both included; it only ever becomes smaller."""

    min_split: int
    max_split: int

    def __contains__(self, split: int) -> bool:
        """Return whether ``split`` may be taken."""
        return self.min_split <= split <= self.max_split

    @property
    def splits(self) -> range:
        """Return all of them, in order."""
        return range(self.min_split, self.max_split + 1)

    def nearest(self, split: int) -> int:
        """Return the allowed split that is nearest to ``split``."""
        return min(max(split, self.min_split), self.max_split)

    def allowed(self, at: Alternation) -> Alternation:
        """Return ``at``, or where one of its splits is not allowed the split that is nearest to its first."""
        if at.split in self and at.other in self:
            return at
        return Alternation.only(self.nearest(at.split))

    def best(self, found: Plan) -> int:
        """Return the plan's split; if it is not allowed, the fastest allowed one, preferably one that fits
        the memory.
        """
        if found.split in self:
            return found.split
        inside = found.candidates[self.min_split : self.max_split + 1]
        fitting = [c.estimate for c in inside if c.fits] or [c.estimate for c in inside]
        return min(fitting, key=lambda e: e.epoch_seconds).split

    def decided(self, found: Plan, reuse: ReusePlan | None) -> Alternation:
        """Return what batches run at by the choice of what is kept, or by the plan alone, as far as it is allowed."""
        if reuse is not None and reuse.split in self:
            return self.allowed(reuse.alternation or Alternation.only(reuse.split))
        at = found.alternation or Alternation.only(found.split)
        return at if at.split in self and at.other in self else Alternation.only(self.best(found))

    def candidates(self, found: Plan) -> list[int]:
        """Return the splits that keeping is planned with: with ``auto`` all allowed ones that fit the memory, else the
        strategy's own.
        """
        fitting = [split for split in self.splits if found.candidates[split].fits]
        return fitting if fitting and found.strategy == "auto" else [self.best(found)]

    def drop_up_to(self, split: int) -> bool:
        """Allow only splits after ``split``; False, with nothing changed, if there is none."""
        if split >= self.max_split:
            return False
        self.min_split = max(self.min_split, split + 1)
        return True

    def drop_from(self, split: int) -> bool:
        """Allow only splits before ``split``; False, with nothing changed, if there is none."""
        if split <= self.min_split:
            return False
        self.max_split = min(self.max_split, split - 1)
        return True

    def narrow(self, min_split: int, max_split: int) -> None:
        """Take over the ends of a run before this one.

        If nothing would be left, this side's memory is another one now and the server's may be too: then
        ``max_split`` does not count.
        """
        self.min_split = max(self.min_split, min_split)
        if self.min_split <= max_split:
            self.max_split = max_split


def first_that_fits(sizes: Sizes, job: Job) -> int:
    """HAPI, Algorithm 1, line 6: the smallest split that is predicted to fit the client's memory.

    Raises :class:`DeviceMemoryError` when none does; its message says what would.
    """
    blank = blank_profile(sizes)
    if job.memory_bytes is None:
        return 0
    for split in range(sizes.last_split + 1):
        if memory(blank, job, split).peak <= job.memory_bytes:
            return split
    return plan("auto", blank, job).split  # raises


def late_split(strategy: str, sizes: Sizes, job: Job, min_split: int) -> int:
    """The later of the two splits that are profiled, of those that are predicted to fit the client's memory.

    HAPI, Algorithm 1: the freeze, where the client does the least, or the split next to it that fits. ``auto`` also
    looks past the freeze, where the server has run all frozen layers too: it takes the split that sends least.

    Raises :class:`DeviceMemoryError` when ``strategy`` will find no split that fits.
    """
    blank = blank_profile(sizes)
    if strategy in PLANNERS:
        plan(strategy, blank, job)  # raises

    def fits(split: int) -> bool:
        """Return whether a split is predicted to fit."""
        return job.memory_bytes is None or memory(blank, job, split).peak <= job.memory_bytes

    if strategy == "auto":
        late = [split for split in range(max(sizes.freeze, min_split), sizes.last_split + 1) if fits(split)]
        if late:
            return min(late, key=lambda split: (blank.sent_bytes(split), split))
    return next((s for s in range(sizes.freeze, min_split - 1, -1) if fits(s)), min_split)


def received_ahead(sizes: Sizes, job: Job, min_split: int) -> int:
    """Return the bytes of batches that may be on this side at once: the job's bound, or on a CPU what memory
    leaves.

    Among the splits from ``min_split`` on that fit, the one that leaves least counts: any of them may be
    next.
    """
    if job.memory_bytes is None or sizes.client.device != "cpu":
        return job.prefetch_bytes
    blank = blank_profile(sizes)
    needs = [memory(blank, job, split) for split in range(min_split, sizes.last_split + 1)]
    left = [job.memory_bytes - (m.peak - m.batches) for m in needs if m.peak <= job.memory_bytes]
    return max(0, min([job.prefetch_bytes, *left]))


def blank_profile(sizes: Sizes) -> Profile:
    """Return a profile that knows bytes and memory, and no seconds."""
    return profile_of(sizes, {}, (1.0, 0.0))
