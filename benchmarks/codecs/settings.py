"""Settings of the benchmark ``codecs``, and its goals."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.epochs.settings import REAL_JOB
from benchmarks.testbed.cells import PAPER_MODELS

DTYPES = ("float32", "bfloat16")
"""Types in which features are encoded."""
SAMPLES = 32
"""Samples whose features are encoded."""
PART_BYTES = 4 << 20
"""Most bytes of a cut's features that are encoded."""
DENSE, SPARSE = 0.3, 0.9
"""Shares of zeros: under the first one features count as dense, from the second one on as sparse."""
DENSE_GOALS = {"float32": 1.16, "bfloat16": 1.45}
"""Goals: ratio of every dense cut, by type."""
SPARSE_GOAL = 8.0
"""Goal: ratio of every sparse cut."""


@dataclass(frozen=True, kw_only=True)
class CodecsSettings:
    """Features to encode, and how far networks without weights of their own are trained first."""

    models: tuple[str, ...] = (*PAPER_MODELS, REAL_JOB)
    image_size: int = 64
    """Side in pixels of the seven families' images; those of the real job have 224."""
    steps: int = 300
    """Most steps of a training."""
    repeats: int = 3
    """Times that each cut is encoded and decoded; the fastest counts."""
    accuracy: bool = False
    """True: heads of the real job are trained on rounded features, too."""
    seeds: int = 5
    epochs: int = 3
    """Of these heads."""

    def measuring(self) -> dict[str, object]:
        """Return the settings that must be the same in all of a file's records."""
        return {"image_size": self.image_size, "samples": SAMPLES, "epochs": self.epochs}
