"""How long a split stays after re-planning chose it."""

from __future__ import annotations

from collections.abc import Callable

from hapi.client.planning.drift import DriftDetector


class ChangeHold:
    """Keeps a split for a number of batches, so that it does not go to and fro with a link or a neighbour that does.

    The hold doubles when the next change comes soon after it, so that a split that looks better and is not is tried
    ever more rarely.
    """

    FIRST, LONGEST = 4, 1024
    """Batches."""

    def __init__(
        self,
        first: int | None = None,
        longest: int | None = None,
        *,
        hysteresis: float | None = None,
        may: Callable[[], bool] | None = None,
    ) -> None:
        """Hold as usual, or otherwise in a simulation.

        Args:
            first: batches of the first hold.
            longest: batches of the longest one.
            hysteresis: share of an epoch's seconds that another split must gain.
            may: asked when the hold is over, whether the split may change now.
        """
        self._first = self.FIRST if first is None else first
        self._longest = self.LONGEST if longest is None else longest
        self._hysteresis, self._may = hysteresis, may
        self._batches = self._since = 0
        self.delayed: int | None = None
        """The split that the hold last kept from being chosen, until the next change."""

    @property
    def hysteresis(self) -> float:
        """Share of an epoch's seconds that another split must gain before the split changes."""
        return DriftDetector.HYSTERESIS if self._hysteresis is None else self._hysteresis

    def batch_done(self) -> None:
        """Count a batch since the last change."""
        self._since += 1

    def allows(self, split: int, *, at_once: bool = False) -> bool:
        """Return whether the split may change, to ``split``; ``at_once``: also before the hold is over."""
        over = (at_once or self._since >= self._batches) and (self._may is None or self._may())
        self.delayed = None if over else split
        return over

    def begin(self) -> None:
        """Note that re-planning has changed the split."""
        soon = self._batches > 0 and self._since < 4 * self._batches
        self._batches = min(self._longest, 2 * self._batches) if soon else self._first
        self._since = 0
        self.delayed = None
