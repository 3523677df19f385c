"""The epochs of one cell of a sweep while it is measured: which splits are near the best, and which are not known yet.

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

DECIDING = 1.05
"""Times the best epoch within which a split decides how good a choice is."""
UNSURE = 0.015
"""Standard error of a median, as a share, above which what decides is measured again."""


class Epochs:
    """Whole epochs by split."""

    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}
        """Seconds."""
        self.bounds: dict[int, float] = {}
        """Lower bounds for splits that were broken off."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Return the epochs in a cell's ``records``."""
        made = cls()
        for record in records:
            if record["kind"] == "run":
                made.note(record)
        return made

    def note(self, run: Mapping[str, Any]) -> None:
        """One more: whole, broken off, or failed, which tells nothing."""
        if run.get("over"):
            self.bounds[run["split"]] = run["seconds"]
        elif run.get("ok"):
            self.found.setdefault(run["split"], []).append(run["seconds"])
            self.bounds.pop(run["split"], None)

    def doubtful(self, factor: float) -> list[int]:
        """Splits that were broken off too early, as seen from the best that is known now."""
        limit = factor * self.best()
        return sorted(split for split, bound in self.bounds.items() if bound < limit)

    def unsure(self, auto: int, enough: float) -> set[int]:
        """Return the deciding splits with less than ``enough`` seconds, if one is not known well enough."""
        if not self.found:
            return set()
        deciding = self.within(DECIDING) | self.found.keys() & {auto}
        if len(deciding) < 2 or all(_standard_error(self.found[split]) <= UNSURE for split in deciding):
            return set()
        return {split for split in deciding if sum(self.found[split]) < enough}

    def seconds_to(self, enough: float, auto: int) -> float:
        """About what it takes until nothing is :meth:`unsure`."""
        return sum(enough - sum(self.found[split]) for split in self.unsure(auto, enough))

    def median(self, split: int) -> float:
        """Seconds of an epoch at ``split``, of which there is one."""
        return statistics.median(self.found[split])

    def best(self) -> float:
        """The shortest one's seconds."""
        return min(self.median(split) for split in self.found)

    def best_split(self) -> int:
        """The one that takes them."""
        return min(self.found, key=self.median)

    def slower(self, split: int) -> str:
        """Say how much slower than the best, for a person; ``>`` for one that was broken off."""
        return f"{self.median(split) / self.best() - 1:+.0%}" if split in self.found else ">"

    def within(self, factor: float) -> set[int]:
        """The splits within ``factor`` of the best."""
        limit = factor * self.best()
        return {split for split in self.found if self.median(split) <= limit}


def _standard_error(times: Sequence[float]) -> float:
    """Standard error of the median of such times (of normal ones), as a share of it."""
    if len(times) < 2:
        return math.inf
    return math.sqrt(math.pi / 2 / len(times)) * statistics.stdev(times) / statistics.median(times)
