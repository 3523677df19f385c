"""Findings of a check of stored data: damaged objects, and the amount that was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_BYTES = 8 << 20
"""Bytes read at once (more by one sample at most)."""


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """One finding; ``str()`` is the line that ``hapi verify`` prints."""

    where: str
    """Key of the object."""
    problem: str
    sample: int | None = None
    start: int | None = None
    """The damaged sample's bytes in the object: ``start..stop``, stop excluded."""
    stop: int | None = None
    extra: bool = False
    """True for an object that is not damaged but belongs to nothing."""

    def __str__(self) -> str:
        sample = "" if self.sample is None else f" sample {self.sample}, bytes {self.start}..{self.stop}:"
        return f"{self.where}:{sample} {self.problem}"


@dataclass
class VerifyReport:
    """Amount that was read, and the findings."""

    name: str
    version: str | None = None
    samples: int = 0
    size: int = 0
    """Bytes of shards that were read."""
    damages: list[Damage] = field(default_factory=list)
    remedy: str = ""
    """Advice that repairs the damage."""
    on_damage: Callable[[Damage], None] = field(default=lambda damage: None, repr=False, compare=False)
    """Told each finding."""

    @property
    def sound(self) -> bool:
        """True when nothing was found, objects that belong to nothing included."""
        return not self.damages

    def add(self, damage: Damage) -> None:
        """Keep a finding, and pass it on at once."""
        self.damages.append(damage)
        self.on_damage(damage)
