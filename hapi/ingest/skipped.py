"""Bad samples that were left out of a dataset because the user chose so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

LISTED_BAD = 20
"""Bad samples that are named; the others are counted."""


@dataclass
class Skipped:
    """Number of bad samples, and a line for each of the first."""

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, other: Skipped) -> None:
        """Add the samples of ``other``."""
        self.count += other.count
        self.lines = (self.lines + other.lines)[:LISTED_BAD]

    def messages(self) -> list[str]:
        """Lines for a person."""
        more = self.count - len(self.lines)
        return [f"left out: {line}" for line in self.lines] + ([f"left out: {more} more"] if more else [])

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse the output of :meth:`to_json`; ValueError for anything else."""
        count, lines = value if isinstance(value, list) and len(value) == 2 else (None, None)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0 or not isinstance(lines, list):
            raise ValueError("no count of samples that were left out")
        return cls(count, [str(line) for line in lines[:LISTED_BAD]])

    def to_json(self) -> list[object]:
        """Return the constructor's arguments."""
        return [self.count, self.lines]
