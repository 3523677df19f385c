"""The batches of a run that profile: their splits, and the profile that they give."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol, TypeVar

from hapi.client.loading.link_stats import Forward
from hapi.client.planning.counts import ClientCounts, CostMeter, Kind, Snapshot, SplitCounts, Work, merged
from hapi.client.planning.observe import observed_between
from hapi.client.settings import ORACLE
from hapi.profiler.fit import Arrivals, Observed, Sizes, link_rate, profile_of
from hapi.profiler.profile import Job, Profile

FEW_PAGES, SIMILAR = 16, 1.25
"""A batch took new memory when it touched more new pages than this many and so many times the fewest a sample."""
OUTLIER_FACTOR = 2.0
"""Times the middle one's seconds a sample, from which on a batch or request was held up and does not count."""
ORACLE_BATCHES = 3
"""Batches that the oracle runs at each split; the first shows what the pipeline held of the split before."""
TIMED = (1, 3, 5)
"""Batches at a split whose layers are timed: several, since some may take new memory."""
ENOUGH_SECONDS = 1.0
"""Work that a split needs in a profile that ends early, beside its first batch: far more than timers err by."""
ENOUGH_OPEN, ENOUGH_DONE = 4, 3
"""Batches that it must have opened, and done at the last split: one to warm up, a timed one and a usual one."""


class Profiling:
    """Training batches at the splits of a schedule, in its order, and their measurements.

    Batches open before others are done, so those under way are kept apart. Not safe for several threads.
    """

    def __init__(self, meter: CostMeter, sizes: Sizes) -> None:
        self._meter = meter
        self._sizes = sizes
        self._schedule: list[tuple[int, bool]] = []
        """(split, whether its layers are timed) of the batches that have not opened yet."""
        self._under_way: list[tuple[int, bool]] = []
        """Batches that have opened and are not done."""
        self._before: Snapshot = {}
        """The sums when profiling began."""
        self._begun: dict[int, Snapshot] = {}
        """The sums when each split's first batch was done."""
        self._so_far: Snapshot = {}
        """The sums when the last batch was done."""
        self._batches: dict[int, list[ClientCounts]] = {}
        """This side's work on each batch at a split that came after its first."""
        self._forwards: dict[int, list[Forward]] = {}
        """Costs of the servers' forward passes for each request."""
        self._intervals: dict[int, list[float]] = {}
        self._may_end_early = self._mixed = False
        self._scheduled_intervals: dict[int, list[float]] = {}
        """Seconds between batches by the split of the schedule, which may be out of reach meanwhile."""
        self._rates: list[tuple[int, float]] = []

    @property
    def left(self) -> bool:
        """True when batches have not opened yet."""
        return bool(self._schedule)

    @property
    def following(self) -> int | None:
        """The split after the one whose batches open now; None after the last."""
        return next((split for split, _ in self._schedule if split != self._schedule[0][0]), None)

    def may_open(self, live: int, job: Job) -> bool:
        """Return whether a batch may open beside ``live`` others: ahead of a profile's end that may come early, no more
        than the job's requests under way are for.
        """
        in_flight = -(-job.in_flight // -(-job.bs // job.request_size))
        return live <= in_flight or not (self._may_end_early and (self.left or self.under_way))

    @property
    def under_way(self) -> bool:
        """True when batches have opened and are not done."""
        return bool(self._under_way)

    def begin(
        self, parts: Sequence[tuple[int, int]], *, may_end_early: bool = False, mixed: bool = False
    ) -> None:
        """Profile anew: (split, batches) of each part, in order.

        The first batch at a split warms up, some are timed layer by layer, the others run as usual.

        Args:
            parts: the splits, each with the most batches that it gets.
            may_end_early: leave a split as soon as its batches are :data:`ENOUGH_SECONDS` of work.
            mixed: batches of all parts alternate, so that no tier is idle, and parts are left together.
        """
        self._may_end_early, self._mixed = may_end_early, mixed
        self._scheduled_intervals.clear()
        each = [[(split, i in _timed(count)) for i in range(count)] for split, count in parts]
        in_order = zip_longest(*each) if mixed else each
        self._schedule = [batch for part in in_order for batch in part if batch is not None]
        self._before = self._meter.snapshot()
        self._so_far = self._before
        self._begun.clear()
        self._batches.clear()
        self._forwards.clear()
        self._meter.take_forwards()  # those before are not what is profiled
        self._intervals.clear()
        self._rates.clear()

    def open(self) -> tuple[int, bool]:
        """Return (split, whether its layers are timed) of the next batch; there must be one left."""
        following = self._schedule.pop(0)
        self._under_way.append(following)
        return following

    def reopen(self) -> None:
        """Schedule batches again that had opened when a pass was left in its middle."""
        self._schedule[:0] = self._under_way
        self._under_way.clear()

    def note(self, split: int, seconds: float, rates: Arrivals) -> None:
        """Note that a batch was trained at ``split``, ``seconds`` after the one before; ``rates``: arrivals
        since that.
        """
        self._rates += rates
        self._take_forwards()
        self._intervals.setdefault(split, []).append(seconds)
        self._scheduled_intervals.setdefault(self._under_way[0][0], []).append(seconds)
        before, self._so_far = self._so_far.get(split, SplitCounts()), self._meter.snapshot()
        if split not in self._begun:
            self._begun[split] = self._so_far
            return
        added = self._so_far.get(split, SplitCounts()) - before
        self._batches.setdefault(split, []).append(added.client)

    def _take_forwards(self) -> None:
        for forward in self._meter.take_forwards():
            self._forwards.setdefault(forward.split, []).append(forward)

    def done(self) -> None:
        """Note that the batch of the last :meth:`note` is over; profiling may end with it."""
        split, _ = self._under_way.pop(0)
        if self._may_end_early:
            self._end_early(split)

    def _end_early(self, split: int) -> None:
        """Open no more batches at ``split`` when there are enough; at the last one wait for none beyond those."""
        if self._mixed:
            self._end_all()
            return
        intervals = self._scheduled_intervals[split]
        after_first = intervals[1:]
        if not after_first:
            return
        worked = sum(after_first)
        ahead = sum(1 for opened, _ in self._under_way if opened == split)
        expected = worked + ahead * worked / len(after_first)
        if len(intervals) + ahead >= ENOUGH_OPEN and expected >= ENOUGH_SECONDS:
            self._schedule = [batch for batch in self._schedule if batch[0] != split]
        if not self._schedule and len(intervals) >= ENOUGH_DONE and worked >= ENOUGH_SECONDS:
            self._under_way.clear()

    def _end_all(self) -> None:
        """End the profile when every split has enough batches; others that have opened are as good as decided ones."""
        splits = {
            split for split, _ in (*self._schedule, *self._under_way)
        } | self._scheduled_intervals.keys()
        done = [self._scheduled_intervals.get(split, []) for split in splits]
        worked = sum(sum(intervals[1:]) for intervals in done)
        if all(len(one) >= ENOUGH_DONE for one in done) and worked >= ENOUGH_SECONDS * len(splits):
            self._schedule.clear()
            self._under_way.clear()

    def seconds(self) -> dict[int, float]:
        """The fastest batch at each split that came after its first, when the pipeline held nothing of another."""
        return {split: min(times[1:] or times) for split, times in self._intervals.items()}

    def profile(self) -> Profile:
        """Return the profile that the batches have shown."""
        after = self._meter.snapshot()
        self._take_forwards()
        observed = {}
        all_batches = [batch for batches in self._batches.values() for batch in batches]
        for split, begun in self._begun.items():
            # This side's first batch warms it up. What the servers did for later ones may lie before its end.
            warm = begun if len(self._intervals[split]) > 1 else self._before
            found = observed_between(
                merged(self._before, warm), after, self._meter.servers, self._sizes.client
            )
            if split in found:
                typical = _typical(found[split], self._batches.get(split, ()), all_batches)
                observed[split] = _with_forwards(typical, self._forwards.get(split, ()))
        link = link_rate(self._rates) or (1e12, 0.0)
        batches = {split: o.batches for split, o in sorted(observed.items())}
        notes = (f"measured on real requests; batches by split: {batches}",)
        return profile_of(self._sizes, observed, link, notes)


def schedule(
    strategy: str, late: int, splits: range, batches: int, limit: int | None
) -> list[tuple[int, int]]:
    """Return (split, batches) of each part of a profile.

    Args:
        strategy: the oracle runs all splits.
        late: the split that others begin with.
        splits: those that may be taken; others end with the smallest.
        batches: of the pass that is profiled.
        limit: batches at each split; None for half the pass.
    """
    if strategy == ORACLE:
        return [(split, ORACLE_BATCHES) for split in splits]
    first = max(1, batches // 2) if limit is None else limit
    second = max(1, batches - first) if limit is None else limit
    return [(late, first), (splits.start, second)]


def _timed(count: int) -> Sequence[int]:
    """Numbers of the batches, among so many at a split, that are timed layer by layer."""
    return TIMED if count > 1 else (0,)


class _Done(Protocol):
    """Work that may have taken new memory: :class:`Work`, or a server's
    :class:`~hapi.client.loading.link_stats.Forward`.
    """

    @property
    def samples(self) -> int: ...
    @property
    def pages(self) -> float: ...
    @property
    def layers(self) -> tuple[float, ...]:
        """Empty if they were not timed one by one."""


T = TypeVar("T", bound=_Done)


def _typical(
    observed: Observed, own: Sequence[ClientCounts], all_batches: Sequence[ClientCounts]
) -> Observed:
    """``observed`` with this side's seconds from typical batches: the split's own for the frozen suffix, all
    splits' for the step.

    A batch that touches memory for the first time is not typical: later ones have it.
    """
    timed = _work(own, "timed")
    suffix = _steady_state(_work(own, "suffix") + timed)
    step = _steady_state(_work(all_batches, "step"))
    changed = replace(
        observed,
        suffix_seconds=_seconds_per_sample(suffix) * observed.samples if suffix else observed.suffix_seconds,
        step_seconds=_seconds_per_sample(step) * observed.samples if step else observed.step_seconds,
    )
    if not timed:
        return changed
    layers, samples = _layers(timed)
    return replace(changed, client_layers=layers, client_timed=samples)


def _with_forwards(observed: Observed, forwards: Sequence[Forward]) -> Observed:
    """``observed`` with the servers' forward seconds from requests that took no new memory, if there are any."""
    chosen, servers = _steady_state(forwards), observed.server.count
    if not chosen or not observed.crossed:
        return observed
    each = observed.crossed / servers
    cpu = [Work(forward.samples, forward.cpu_seconds) for forward in chosen]
    wall = [Work(forward.samples, forward.seconds) for forward in chosen]
    layers, timed = _layers([forward for forward in forwards if forward.layers])
    return replace(
        observed,
        server_cpu={**observed.server_cpu, "forward": each * _seconds_per_sample(cpu)},
        server_wall={**observed.server_wall, "forward": each * _seconds_per_sample(wall)},
        server_layers=tuple(seconds / servers for seconds in layers),
        server_timed=timed,
    )


def _work(batches: Sequence[ClientCounts], kind: Kind) -> list[Work]:
    """The work of this kind on those of the batches that had some."""
    found: list[Work] = [getattr(batch, kind) for batch in batches]
    return [work for work in found if work.samples > 0]


def _seconds_per_sample(work: Sequence[Work]) -> float:
    """Mean seconds a sample, freaks aside."""
    limit = OUTLIER_FACTOR * statistics.median_low(one.seconds / one.samples for one in work)
    usual = [one for one in work if one.seconds <= limit * one.samples]
    return sum(one.seconds for one in usual) / sum(one.samples for one in usual)


def _layers(timed: Sequence[_Done]) -> tuple[tuple[float, ...], int]:
    """Seconds in each layer, and of how many samples in all."""
    usual = _without_new_memory(timed)
    seconds = zip(*(one.layers for one in usual), strict=False)
    return tuple(map(sum, seconds)), round(sum(one.samples for one in usual))


def _steady_state(done: Sequence[T]) -> list[T]:
    """Work that took no new memory, and, if there is any, was not timed layer by layer, which on a GPU takes
    longer.
    """
    usual = _without_new_memory(done)
    return [one for one in usual if not one.layers] or usual


def _without_new_memory(done: Sequence[T]) -> list[T]:
    """Work that took no more new memory than is usual."""
    fewest = min((one.pages / one.samples for one in done), default=0.0)
    return [one for one in done if one.pages <= FEW_PAGES + SIMILAR * fewest * one.samples]
