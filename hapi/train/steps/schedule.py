"""Learning rates as a pure function of the step's number, with the values of torch's own schedulers.

A resumed run needs no state of a scheduler for it, and one that is resumed with other epochs goes on as if it had been
begun with them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hapi.errors import UsageError

WARMUP_FACTOR = 0.01
"""First factor of a warm-up (torch's LinearLR with this ``start_factor``)."""
RISE, FIRST_DIVISOR, LAST_DIVISOR = 0.3, 25.0, 1e4
"""One-cycle, as torch's OneCycleLR has them by default: share of the steps in which the rate rises, largest over first
rate, first over last rate."""
_EPOCHS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?:ep|epochs?)", re.ASCII)


def check_length(length: int | str, flag: str) -> None:
    """Raise :class:`UsageError` naming ``flag`` unless ``length`` is steps (500) or epochs (``2ep``)."""
    if isinstance(length, str) and _EPOCHS.fullmatch(length) is None:
        raise UsageError(f"{flag} {length!r}: expected steps (500) or epochs (2ep, 0.5ep)")


def steps_in(length: int | str, steps_per_epoch: int) -> int:
    """Return the steps of ``length``, which :func:`check_length` accepts; at least one unless it is zero."""
    if isinstance(length, int):
        return length
    found = _EPOCHS.fullmatch(length)
    epochs = 0.0 if found is None else float(found[1])
    return max(1, round(epochs * steps_per_epoch)) if epochs else 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of each optimiser step of a training."""

    kind: str
    """``constant``, ``cosine``, ``step`` or ``one-cycle``."""
    total: int
    """Steps of the training."""
    warmup: int = 0
    """Steps in which the rate rises; in one-cycle 0 stands for its own share."""
    every: int = 1
    """Steps between two falls of a step schedule."""
    factor: float = 0.1
    """Factor of each fall."""
    min_rate: float = 0.0
    """Rate at the end of a cosine schedule."""

    def rate(self, base: float, step: int) -> float:
        """Return the learning rate of ``step`` (from 0) for parameters whose full rate is ``base``."""
        if self.kind == "one-cycle":
            return self._one_cycle(base, step)
        if step < self.warmup:
            return base * (WARMUP_FACTOR + (1 - WARMUP_FACTOR) * step / self.warmup)
        step -= self.warmup
        if self.kind == "cosine":
            return _cosine(base, self.min_rate, step / max(1, self.total - self.warmup))
        return base * self.factor ** (step // self.every) if self.kind == "step" else base

    def _one_cycle(self, base: float, step: int) -> float:
        first = base / FIRST_DIVISOR
        rise = (self.warmup or RISE * self.total) - 1
        if step <= rise:
            return _cosine(first, base, step / rise if rise else 1.0)
        return _cosine(base, first / LAST_DIVISOR, (step - rise) / (self.total - 1 - rise))


def _cosine(start: float, end: float, part: float) -> float:
    """The value at ``part`` (0 to 1) of the way from ``start`` to ``end`` along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2
