"""The client's share of the frozen layers, in micro-batches that fit its memory."""

from __future__ import annotations

import torch
from torch import nn

from hapi.errors import DeviceMemoryError


class FrozenRest:
    """Layers split+1..freeze: eval mode, no gradient, a micro-batch at a time.

    The result is the same as in one piece, since frozen layers treat each sample by itself; the memory is that of
    a micro-batch plus the outputs. The micro-batch is halved, and stays so, when the device runs out of memory.
    """

    def __init__(
        self,
        layers: nn.Module,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        micro_batch: int,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self.micro_batch = micro_batch

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[B, ...] host features to [B, ...] on the device; :class:`DeviceMemoryError` if one sample does not fit."""
        output = torch.empty((len(features), *self._shape), dtype=self._dtype, device=self._device)
        start = 0
        while start < len(features):
            stop = start + self.micro_batch
            try:
                with torch.no_grad():
                    output[start:stop] = self._layers(
                        features[start:stop].to(self._device, non_blocking=True)
                    )
            except torch.cuda.OutOfMemoryError:
                if self.micro_batch == 1:
                    raise DeviceMemoryError(
                        f"one sample does not fit {self._device}; choose a later split (--split freeze)"
                    ) from None
                self.micro_batch = max(1, self.micro_batch // 2)
                torch.cuda.empty_cache()
                continue
            start = stop
        return output
