"""A split that is worth taking the optimiser's states out of the memory."""

from __future__ import annotations

from typing import NamedTuple

from hapi.units import format_duration


class FasterSplit(NamedTuple):
    """A split that fits the memory only with the states on a disk, and is faster than any that fits without."""

    split: int
    epoch_seconds: float
    fitting: int
    """The best one that fits with the states in memory."""
    fitting_seconds: float

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"at split {self.split} an epoch then takes {format_duration(self.epoch_seconds)}; with the states in "
            f"memory it is {format_duration(self.fitting_seconds)}, at split {self.fitting}"
        )
