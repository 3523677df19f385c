"""The batches of a run that profile: at which splits they open, and the profile that they give."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from hapi.client.measuring import Counts, Meter, Snapshot, merged, observed_between
from hapi.profiler.observe import Arrivals, Observed, Sizes, link_rate, profile_of
from hapi.profiler.profile import Profile

FEW_PAGES, SIMILAR = 16, 1.25
"""A batch took new memory when it touched more new pages than this many and so many times the fewest of a batch."""


class Profiling:
    """Training batches at the splits of a schedule, in its order, and what they show.

    Batches open before others are done, so those under way are kept apart. Not safe for several threads.
    """

    def __init__(self, meter: Meter, sizes: Sizes) -> None:
        self._meter = meter
        self._sizes = sizes
        self._schedule: list[tuple[int, bool]] = []
        """(split, whether its layers are timed) of the batches that have not opened yet."""
        self._under_way: list[tuple[int, bool]] = []
        """Of those that have opened and are not done."""
        self._before: Snapshot = {}
        """The sums when profiling began."""
        self._begun: dict[int, Snapshot] = {}
        """The sums when each split's first batch was done."""
        self._so_far: Snapshot = {}
        """The sums when the last batch was done."""
        self._batches: dict[int, list[Counts]] = {}
        """What each batch at a split that came after its first added to that split's sums."""
        self._intervals: dict[int, list[float]] = {}
        self._rates: list[tuple[int, float]] = []

    @property
    def left(self) -> bool:
        """Whether batches have not opened yet."""
        return bool(self._schedule)

    @property
    def under_way(self) -> bool:
        """Whether batches have opened and are not done."""
        return bool(self._under_way)

    def begin(self, parts: Sequence[tuple[int, int]]) -> None:
        """Profile anew: (split, batches) of each part, in order.

        The first batch at a split warms up, the second is timed layer by layer, the others as they will run.
        """
        self._schedule = [(split, i == min(1, count - 1)) for split, count in parts for i in range(count)]
        self._before = self._meter.snapshot()
        self._so_far = self._before
        self._begun.clear()
        self._batches.clear()
        self._intervals.clear()
        self._rates.clear()

    def open(self) -> tuple[int, bool]:
        """(split, whether its layers are timed) of the next batch; there must be one left."""
        following = self._schedule.pop(0)
        self._under_way.append(following)
        return following

    def again(self) -> None:
        """What had opened when a pass was left in its middle comes once more."""
        self._schedule[:0] = self._under_way
        self._under_way.clear()

    def note(self, split: int, seconds: float, rates: Arrivals) -> None:
        """A batch was trained at ``split``, ``seconds`` after the one before; ``rates``: arrivals since that."""
        self._rates += rates
        self._intervals.setdefault(split, []).append(seconds)
        before, self._so_far = self._so_far.get(split, {}), self._meter.snapshot()
        if split not in self._begun:
            self._begun[split] = self._so_far
            return
        counts = self._so_far.get(split, {})
        added = {name: value - before.get(name, 0.0) for name, value in counts.items()}
        self._batches.setdefault(split, []).append(added)

    def done(self) -> None:
        """The batch that :meth:`note` told of is over."""
        self._under_way.pop(0)

    def seconds(self) -> dict[int, float]:
        """The fastest batch at each split that came after its first, when the pipeline held nothing of another."""
        return {split: min(times[1:] or times) for split, times in self._intervals.items()}

    def profile(self) -> Profile:
        """What the batches have shown."""
        after = self._meter.snapshot()
        observed = {}
        all_batches = [batch for batches in self._batches.values() for batch in batches]
        for split, begun in self._begun.items():
            # This side's first batch warms it up. What the servers did for later ones may lie before its end.
            warm = begun if len(self._intervals[split]) > 1 else self._before
            found = observed_between(
                merged(self._before, warm), after, self._meter.servers, self._sizes.client
            )
            if split in found:
                observed[split] = _typical(found[split], self._batches.get(split, ()), all_batches)
        link = link_rate(self._rates) or (1e12, 0.0)
        batches = {split: o.batches for split, o in sorted(observed.items())}
        notes = (f"measured on real requests; batches by split: {batches}",)
        return profile_of(self._sizes, observed, link, notes)


def _typical(observed: Observed, own: Sequence[Counts], all_batches: Sequence[Counts]) -> Observed:
    """With this side's seconds from typical batches: of the frozen rest its own, of the step those of every split.

    A batch that takes memory which nothing had touched before is no typical one: later ones have it.
    """
    rest = _seconds_a_sample(own, "rest", "rested")
    step = _seconds_a_sample(all_batches, "step", "handed_out")
    return replace(
        observed,
        rest_seconds=observed.rest_seconds if rest is None else rest * observed.samples,
        step_seconds=observed.step_seconds if step is None else step * observed.samples,
    )


def _seconds_a_sample(batches: Sequence[Counts], name: str, samples: str) -> float | None:
    """Of the middle one, the lower of two, of those batches that touched the fewest new pages."""
    done = [batch for batch in batches if batch.get(samples, 0.0) > 0]
    if not done:
        return None
    pages = [batch.get(f"{name}_pages", 0.0) for batch in done]
    most = FEW_PAGES + SIMILAR * min(pages)
    return statistics.median_low(
        batch.get(name, 0.0) / batch[samples] for batch, new in zip(done, pages, strict=True) if new <= most
    )
