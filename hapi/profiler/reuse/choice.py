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

    def wire_of(self, split: int) -> CodecCost | None:
        """Return the codec on the wire at ``split``; None where no batch runs there."""
        if split == self.split:
            return self.wire
        return self.other_wire if self.alternation is not None and split == self.alternation.other else None

    def within(self, splits: Sequence[int]) -> bool:
        """Return whether all batches run at ``splits``."""
        return self.split in splits and (self.alternation is None or self.alternation.other in splits)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a job."""

    mode: Mode
    cut: int
    """Layer whose output is kept; 0 for stored samples, and where nothing is kept."""
    crossing: Crossing
    """Samples that are not kept, as long as the cache fills."""
    codec: CodecCost = RAW
    """Codec of what is kept."""
    limit: float = 1.0
    """Part of the samples that is kept and read although there may be room: more would be read too slowly."""
    later: Crossing | None = None
    """Samples that are not kept once nothing more comes into the cache; None where they go on as before."""

    def at(self, crossing: Crossing) -> Choice:
        """Return the choice with samples that cross as ``crossing`` says, from now on."""
        return replace(self, crossing=crossing, later=None)

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
        return self.crossing.within(splits) and (self.later is None or self.later.within(splits))
