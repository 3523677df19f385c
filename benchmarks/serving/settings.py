"""Settings that the studies of single layers, requests and batches have in common."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.testbed.cells import PAPER_MODELS


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Measurements to take; each model once."""

    models: tuple[str, ...] = PAPER_MODELS
    image_size: int = 64
    repeats: int = 3
    """Measurements of each figure that count."""
    device: str = "cpu"
    """Device of both tiers."""
