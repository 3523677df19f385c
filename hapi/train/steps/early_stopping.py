"""The end of a training that no longer gets better, as a pure function of its epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hapi.text import counted


def stop_reason(scores: Iterable[float], allowed: int, min_improvement: float = 0.0) -> str:
    """Return why training stops after epochs with these scores, or an empty text when it goes on.

    Args:
        scores: figures that the epochs from epoch 0 on are judged by, higher is better.
        allowed: epochs in a row without improvement that end the training.
        min_improvement: a score is better if it exceeds the best by more than this.
    """
    best, since, at = -math.inf, 0, 0
    for number, value in enumerate(scores):
        since += 1
        if value > best + min_improvement:
            best, since, at = value, 0, number
    return "" if since < allowed else f"no improvement in {counted(since, 'epoch')} after epoch {at}"
