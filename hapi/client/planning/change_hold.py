"""How long a split stays after re-planning chose it."""

from __future__ import annotations


class ChangeHold:
    """Keeps a split for a number of batches, so that it does not go to and fro with a link or a neighbour that does.

    The hold doubles when the next change comes soon after it, so that a split that looks better and is not is tried
    ever more rarely.
    """

    FIRST, LONGEST = 4, 1024
    """Batches."""

    def __init__(self) -> None:
        self._batches = self._since = 0
        self.delayed: int | None = None
        """The split that the hold last kept from being chosen, until the next change."""

    def batch_done(self) -> None:
        """Count a batch since the last change."""
        self._since += 1

    def allows(self, split: int) -> bool:
        """Return whether the split may change, to ``split``."""
        over = self._since >= self._batches
        self.delayed = None if over else split
        return over

    def begin(self) -> None:
        """Note that re-planning has changed the split."""
        soon = self._batches > 0 and self._since < 4 * self._batches
        self._batches = min(self.LONGEST, 2 * self._batches) if soon else self.FIRST
        self._since = 0
        self.delayed = None
