"""The memory format in which a frozen prefix computes: measured when it is loaded.

Convolutions are faster over channels-last inputs on most processors (measured: 1.1 to 1.2 times), but sum in another
order, so that the last bits differ: about 2e-6 of the largest feature. So it is off unless the operator asks for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from hapi.models.devices import finish
from hapi.models.graph.segment import Segment
from hapi.process.memory_errors import is_out_of_memory
from hapi.server.settings import MemoryFormat

log = logging.getLogger("hapi.server")

BATCH = 4
"""Most samples of a timed pass."""
PAIRS = 3
"""Timed pairs after one to warm up, of which the fastest pass of each format counts."""
SECONDS = 1.0
"""Time after which no more pairs are begun."""
GAIN = 0.95
"""Largest share of the contiguous format's seconds that channels-last may take to be chosen."""

Layers = Callable[[torch.Tensor], torch.Tensor]


def channels_last(layers: Layers) -> Layers:
    """Return ``layers`` for inputs [n, C, H, W] that are put into the channels-last format first."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return layers(x.contiguous(memory_format=torch.channels_last))

    return run


def suits_channels_last(segment: Segment, wanted: MemoryFormat, device: torch.device, batch: int) -> bool:
    """Return whether a prefix should compute in the channels-last format.

    Args:
        segment: its layers, with their weights.
        wanted: the operator's setting; with ``auto`` both formats are timed.
        device: that runs the layers.
        batch: most samples that its memory was reserved for.
    """
    if wanted == "contiguous" or len(segment.input_shape) != 3:
        return False
    if wanted == "channels-last":
        return True
    try:
        plain, other = _seconds(segment, device, min(BATCH, batch))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    chosen = other <= GAIN * plain
    log.info(
        "memory format measured",
        extra={
            "layers": segment.stop,
            "contiguous_ms": round(plain * 1e3, 3),
            "channels_last_ms": round(other * 1e3, 3),
            "chosen": "channels-last" if chosen else "contiguous",
        },
    )
    return chosen


def _seconds(segment: Segment, device: torch.device, batch: int) -> tuple[float, float]:
    """Fastest seconds of a pass, contiguous and channels-last; in turns, so that others' load slows down both."""
    x = torch.zeros((batch, *segment.input_shape), device=device)
    forms: tuple[Layers, Layers] = (segment, channels_last(segment))
    found: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    with torch.inference_mode():
        while len(found[0]) <= PAIRS and (len(found[0]) < 2 or time.perf_counter() - began < SECONDS):
            for layers, seconds in zip(forms, found, strict=True):
                started = time.perf_counter()
                layers(x)
                finish(device)
                seconds.append(time.perf_counter() - started)
    return min(found[0][1:]), min(found[1][1:])
