"""Analysis of a sweep's results by cell and by strategy; :mod:`benchmarks.split.views` prints it. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.testbed.cells import Cell, cells_of, last_begun
from hapi.errors import UsageError

ORDER = ("auto", "hapi", "nsg", "bandwidth", "min", "freeze", "none")
"""Strategies, as the tables list them."""


@dataclass
class Measured:
    """One cell's results."""

    cell: Cell
    choices: dict[str, int]
    estimates: dict[str, list[float]]
    """Seconds of the epoch by split: ``auto`` (streamed form), ``paper``, ``sum`` (Neurosurgeon's)."""
    wire: list[int]
    """Estimated bytes of an epoch by split."""
    times: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of whole epochs by split."""
    bytes_received: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, float] = field(default_factory=dict)
    """Lower bounds for splits that were broken off: their epoch takes longer."""
    tensors: dict[str, float] = field(default_factory=dict)
    """NoSplit with samples stored as ``uint8`` or ``float32`` tensors; seconds."""
    unfit: set[int] = field(default_factory=set)
    """Splits that ran out of the client's memory."""

    def seconds(self, split: int) -> float | None:
        """The median of the whole epochs; None for a split that was broken off."""
        return statistics.median(self.times[split]) if split in self.times else None

    def lower_bound(self, split: int) -> float | None:
        """The median, or of a split that was broken off what its epoch takes at least; None when it did not fit."""
        seconds = self.seconds(split)
        return self.bounds.get(split) if seconds is None else seconds

    @property
    def best(self) -> float:
        """The shortest epoch's seconds: the truth that strategies are compared with."""
        return min(statistics.median(t) for t in self.times.values())

    def slower(self, split: int) -> float | None:
        """Return how much longer than the best, as a share; None when it is beyond all bounds."""
        seconds = self.seconds(split)
        return None if seconds is None else seconds / self.best - 1


def measured_cells(records: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The cells that were measured whole, in the order of their ends; :class:`UsageError` without any."""
    found = []
    cells = cells_of(dict(r) for r in records)
    for key, cell in cells.items():
        of = last_begun([dict(r) for r in records if r.get("cell") == key])
        plans = [r for r in of if r["kind"] == "plan"]
        if not plans:
            continue
        plan = plans[-1]
        one = Measured(cell, plan["choices"], {k: plan[k] for k in ("auto", "paper", "sum")}, plan["wire"])
        for r in of:
            if r["kind"] == "run" and r.get("over"):
                one.bounds[r["split"]] = r["seconds"]
            elif r["kind"] == "run" and r.get("ok"):
                one.bounds.pop(r["split"], None)
                one.times.setdefault(r["split"], []).append(r["seconds"])
                one.bytes_received[r["split"]] = r["bytes"]
            elif r["kind"] == "run":
                one.unfit.add(r["split"])
            elif r["kind"] == "none" and r.get("ok") and not r["over"]:
                one.tensors[r["form"]] = r["seconds"]
            elif r["kind"] == "twin":
                _as(one, r["split"], r["of"])
        if one.times:
            found.append(one)
    if not found:
        raise UsageError("no cell has been measured whole yet; run 'python -m benchmarks sweep' first")
    return found


def _as(one: Measured, split: int, measured: int) -> None:
    """``split`` differs in nothing from the one that was ``measured``."""
    tables: tuple[dict[int, Any], ...] = (one.times, one.bytes_received, one.bounds)
    for known in tables:
        if measured in known:
            known[split] = known[measured]
    if measured in one.unfit:
        one.unfit.add(split)


def unfit_cells(records: Sequence[Mapping[str, Any]]) -> int:
    """Cells in which no split fitted the client's memory, by prediction or when it was run; no table has them."""
    predicted = {r["cell"] for r in records if r["kind"] == "unfit"}
    ran = {r["cell"] for r in records if r["kind"] == "run" and (r.get("ok") or r.get("over"))}
    tried = {r["cell"] for r in records if r["kind"] == "run"}
    return len(predicted | (tried - ran))


@dataclass(frozen=True)
class Optimality:
    """Counts of cells by the quality of a strategy's split (later HAPI text, Table 3)."""

    optimal: int
    within_5: int
    within_10: int
    within_15: int
    beyond: int
    unfit: int
    """Out of memory."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Counts in the table's order."""
        return (self.optimal, self.within_5, self.within_10, self.within_15, self.beyond, self.unfit)

    @property
    def cells(self) -> int:
        """All of them."""
        return sum(self.counts)

    @property
    def good(self) -> float:
        """Share of optimal and within 5%."""
        return (self.optimal + self.within_5) / max(1, self.cells)


NOISE = 0.01
"""Two splits whose medians differ by less are equally good: the best of them is the luck of the run."""
_LIMITS = (NOISE, 0.05, 0.10, 0.15)
_BEYOND, _UNFIT = 4, 5


def optimality(cells: Sequence[Measured], strategy: str) -> Optimality:
    """Table 3's row of ``strategy``."""
    counts = [0] * 6
    for one in cells:
        split = one.choices[strategy]
        slower = one.slower(split)
        if slower is None:
            counts[_UNFIT if split in one.unfit else _BEYOND] += 1
        else:
            counts[next((i for i, limit in enumerate(_LIMITS) if slower <= limit), _BEYOND)] += 1
    return Optimality(*counts)


def spreads(cells: Sequence[Measured]) -> list[float]:
    """(slowest - fastest) / fastest of every split's whole epochs of which there are several: the machine's noise."""
    return [
        (max(times) - min(times)) / min(times)
        for one in cells
        for times in one.times.values()
        if len(times) > 1
    ]


def by_halves(cells: Sequence[Measured], strategy: str | None = None) -> list[float]:
    """Return how much slower than the best a chosen split is, as a share, judged by every other one of the
    epochs.

    The choice is the strategy's or, without one, that of an oracle with as many epochs of every split: the
    others. How often that one fails is what these epochs cannot tell. Two figures a cell, as either half
    judges; of splits with an epoch in both halves. Infinite for a choice that is none of them.
    """
    found = []
    for one in cells:
        twice = {split: times for split, times in one.times.items() if len(times) > 1}
        halves = [
            {split: statistics.median(times[half::2]) for split, times in twice.items()} for half in (0, 1)
        ]
        for chooses, judges in (halves, halves[::-1]) if twice else ():
            choice = min(chooses, key=lambda s: chooses[s]) if strategy is None else one.choices[strategy]
            found.append(judges.get(choice, math.inf) / min(judges.values()) - 1)
    return found


def slower_than(cells: Sequence[Measured], by: float, than: Sequence[str]) -> int:
    """Cells where ``auto``'s epoch takes more than ``by`` (a share) longer than the best of these strategies takes."""
    found = 0
    for one in cells:
        seconds = one.lower_bound(one.choices["auto"])
        others = [bound for name in than if (bound := one.lower_bound(one.choices[name])) is not None]
        found += seconds is None or (bool(others) and seconds > (1 + by) * min(others))
    return found


def surely_slower(cells: Sequence[Measured], by: float, than: Sequence[str] = ()) -> int:
    """Cells where ``auto``'s split is more than ``by`` (a share) slower than the best beyond doubt.

    Its epochs, which a sweep always repeats, stand against the best split's, taken ``by`` longer: so unequal an order
    has a chance of at most 5% (rank-sum test, exact, one-sided). The best is the best of these very epochs, so this
    counts rather too many; but of few epochs no order is unequal enough, so other cells may be slower, too. A split
    that was broken off beyond ``by``, or did not fit, is surely slower. With ``than`` the best is one of what these
    strategies chose.
    """
    found = 0
    for one in cells:
        split, others = one.choices["auto"], {one.choices[name] for name in than}
        known = [times for other, times in one.times.items() if not than or other in others]
        best = min(known, key=statistics.median) if known else []
        if split in one.unfit:
            found += 1
        elif best and split in one.times:
            found += _chance([(1 + by) * seconds for seconds in best], one.times[split]) <= 0.05
        elif best:
            found += one.bounds.get(split, 0.0) > (1 + by) * statistics.median(best)
    return found


def _chance(fast: Sequence[float], slow: Sequence[float]) -> float:
    """Chance that ``len(slow)`` values drawn blindly from both have ranks that add up to as much as those of
    ``slow``.
    """
    both = sorted((*fast, *slow))
    # Equal ones share their rank, so twice of it.
    twice = [2 * bisect_left(both, value) + both.count(value) + 1 for value in both]
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in slow)]
    for rank in twice:
        for taken in range(len(slow), 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] += count
    observed = sum(twice[bisect_left(both, value)] for value in slow)
    return sum(count for total, count in ways[-1].items() if total >= observed) / math.comb(
        len(both), len(slow)
    )


def errors_of_epochs(cells: Sequence[Measured], *, chosen_by: str | None = None) -> list[float]:
    """Return :func:`errors` as if each epoch were estimated by another one of its split, measured for that."""
    found = []
    for one in cells:
        for split, times in one.times.items():
            if len(times) > 1 and (chosen_by is None or split == one.choices[chosen_by]):
                for i, seconds in enumerate(times):
                    others = statistics.median(times[:i] + times[i + 1 :])
                    found.append(abs(seconds - others) / others)
    return found


def errors(cells: Sequence[Measured], form: str, *, chosen_by: str | None = None) -> list[float]:
    """|estimated - measured| / measured of every whole epoch, or only at the splits that a strategy chose."""
    found = []
    for one in cells:
        for split in one.times:
            if chosen_by is None or split == one.choices[chosen_by]:
                seconds = one.seconds(split)
                if seconds:
                    found.append(abs(one.estimates[form][split] - seconds) / seconds)
    return found


def rows(cells: Sequence[Measured]) -> list[dict[str, Any]]:
    """Everything that the views are made of, a row for each split of each cell; for CSV and JSON."""
    found = []
    for one in cells:
        for split in sorted(one.times.keys() | one.bounds.keys() | one.unfit):
            seconds = one.seconds(split)
            found.append(
                {
                    "model": one.cell.model,
                    "bs": one.cell.bs,
                    "bandwidth": one.cell.bandwidth,
                    "image_size": one.cell.image_size,
                    "split": split,
                    "seconds": seconds,
                    "runs": len(one.times.get(split, ())),
                    "longer_than": one.bounds.get(split),
                    "out_of_memory": split in one.unfit,
                    "slower_than_best": None if seconds is None else round(seconds / one.best - 1, 5),
                    **{f"estimated_{form}": values[split] for form, values in one.estimates.items()},
                    "bytes": one.bytes_received.get(split, one.wire[split]),
                    "chosen_by": " ".join(name for name in ORDER if one.choices[name] == split),
                }
            )
    return found
