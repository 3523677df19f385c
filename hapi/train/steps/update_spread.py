"""The seconds of an optimiser update, shared out among the batches whose gradients it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hapi.client.planning.meter import Meter
from hapi.models.devices import finish
from hapi.profiler.timing import work_clock


class UpdateSpread:
    """Keeps a batch's measured seconds from jumping where one of several batches has the update.

    Each batch counts its share of the last update, and the batch that has an update counts what is left of it: the
    sum over the batches of an update is what they took.
    """

    def __init__(self, meter: Meter, device: torch.device, batches: int) -> None:
        """Begin with no update.

        Args:
            meter: of the session.
            device: of the trained layers.
            batches: training batches of an update.
        """
        self._meter, self._device, self._batches = meter, device, batches
        self._clock = work_clock(device)
        self._last = self._counted = 0.0

    @contextmanager
    def batch(self, has_update: bool) -> Iterator[None]:
        """Count a batch, whose update, if it has one, runs in the block."""
        if self._batches == 1:
            yield
            return
        share = self._last / self._batches
        self._counted += share
        if not has_update:
            self._meter.shift_step(share)
            yield
            return
        self._meter.shift_step(share - self._counted)
        self._counted = 0.0
        finish(self._device)
        began = self._clock()
        yield
        finish(self._device)
        self._last = self._clock() - began
