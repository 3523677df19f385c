"""Frozen layers one by one, with the seconds of each: the same operations in the same order, so the same result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hapi.models.devices import finish
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.segment import Segment


def work_clock(device: torch.device) -> Callable[[], float]:
    """The clock that tells what computing costs on ``device``, in seconds.

    On a CPU with one thread the thread's CPU time, which others on the same core do not lengthen; else the wall's.
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if one_thread else time.perf_counter


def layer_segments(model: LayeredModel, start: int, stop: int) -> list[Segment]:
    """Return layers ``start + 1`` to ``stop`` one by one; each may change its input in place."""
    return [model.segment(i, i + 1, frozen=True, own_input=i > start) for i in range(start, stop)]


class TimedLayers:
    """Runs segments one after another; not thread-safe.

    Each is waited for, so that on a GPU the whole is slower than a segment of all of them.
    """

    def __init__(
        self,
        layers: Sequence[Segment],
        device: torch.device,
        observe: Callable[[int, torch.Tensor], None] = lambda number, output: None,
    ) -> None:
        """Time ``layers``; ``observe`` is told each one's number from 0 and its output, which it may not keep."""
        self._layers, self._observe = layers, observe
        self._device = device
        self._clock = work_clock(device)
        self.seconds = [0.0] * len(layers)
        """Seconds in each layer, summed over all calls."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] through all layers."""
        clock, device = self._clock, self._device
        before = clock()
        for i, layer in enumerate(self._layers):
            x = layer(x)
            finish(device)
            now = clock()
            self.seconds[i] += now - before
            self._observe(i, x)
            before = clock()
        return x
