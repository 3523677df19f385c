"""One way to run a job: what it keeps, where samples that are not kept are computed, and when that changes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hapi.profiler.reuse.facts import RAW, CodecCost
from hapi.profiler.stages.alternation import Alternation

Mode = Literal["recompute", "keep samples", "keep there", "keep here"]
"""``recompute``: nothing is kept. ``keep samples``: stored samples on the trainer's disk. ``keep there``: features at
the split, beside the store; they cross in each epoch. ``keep here``: features at the cut, on the trainer's disk.
"""
MODE_NAMES: dict[Mode, str] = {
    "recompute": "nothing",
    "keep samples": "samples here",
    "keep there": "features there",
    "keep here": "features here",
}
"""Names of the modes, for people."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Splits at which samples cross, and codecs on the wire."""

    split: int
    wire: CodecCost = RAW
    """Codec of features on the wire."""
    alternation: Alternation | None = None
    """Batches alternate between :attr:`split` and another one."""
    other_wire: CodecCost = RAW
    """Codec on the wire at that one."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a job."""

    mode: Mode
    cut: int
    """Layer whose output is kept; 0 for stored samples, and where nothing is kept."""
    split: int
    """Split of the samples that are not kept."""
    codec: CodecCost = RAW
    """Codec of what is kept."""
    wire: CodecCost = RAW
    """Codec of features on the wire."""
    limit: float = 1.0
    """Part of the samples that is kept and read although there may be room: more would be read too slowly."""
    alternation: Alternation | None = None
    """Batches whose samples are not kept alternate between :attr:`split` and another one."""
    other_wire: CodecCost = RAW
    """Codec on the wire at that one."""
    later: Crossing | None = None
    """Samples that are not kept once nothing more comes into the cache; None where they go on as before."""

    @property
    def crossing(self) -> Crossing:
        """Samples that are not kept while the cache fills."""
        return Crossing(
            split=self.split, wire=self.wire, alternation=self.alternation, other_wire=self.other_wire
        )

    def at(self, crossing: Crossing) -> Choice:
        """Return the choice with samples that cross as ``crossing`` says, from now on."""
        return replace(
            self,
            split=crossing.split,
            wire=crossing.wire,
            alternation=crossing.alternation,
            other_wire=crossing.other_wire,
            later=None,
        )

    @property
    def settled(self) -> Choice:
        """The choice once nothing more comes into the cache."""
        return self if self.later is None else self.at(self.later)

    @property
    def unchanging(self) -> Choice:
        """The choice with samples that cross as now in all epochs: a run chooses anew when its cache is full."""
        return replace(self, later=None)

    def then(self, later: Crossing) -> Choice:
        """Return the choice with another crossing once nothing more comes into the cache."""
        return replace(self, later=None if later == self.crossing else later)

    def within(self, splits: Sequence[int]) -> bool:
        """Return whether all batches run at ``splits``."""
        ways = (self.crossing,) if self.later is None else (self.crossing, self.later)
        return all(
            way.split in splits and (way.alternation is None or way.alternation.other in splits)
            for way in ways
        )

    def wire_of(self, split: int) -> CodecCost | None:
        """Return the codec on the wire at ``split`` now; None where no batch runs there."""
        if split == self.split:
            return self.wire
        return self.other_wire if self.alternation is not None and split == self.alternation.other else None
