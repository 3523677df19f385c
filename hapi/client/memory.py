"""The client's share of the frozen layers, in micro-batches that fit its memory."""

from __future__ import annotations

import torch
from torch import nn

from hapi.errors import DeviceMemoryError
from hapi.models.devices import is_out_of_memory


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A whole training batch on ``device``; :class:`DeviceMemoryError` if it does not fit.

    From pinned memory the copy to a GPU is only begun here: ``tensor``'s memory must stay as it is until the
    current stream has come past it.
    """
    try:
        return tensor.to(device, non_blocking=True)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise _batch_too_large(tensor.nbytes, len(tensor), device)


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
        """[B, ...] host features to [B, ...] on the device; :class:`DeviceMemoryError` if they do not fit.

        On a GPU this returns before the device is done; ``features`` must stay as they are until then.
        """
        output = self._output(len(features))
        start = 0
        while start < len(features):
            rows = slice(start, start + self.micro_batch)
            try:
                self._step(features[rows], output[rows])
                start = rows.stop
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Only here, after the handler, are the tensors gone that the error's frames held.
            self._halve()
        return output

    @torch.no_grad()
    def _step(self, features: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(self._layers(features.to(self._device, non_blocking=True)))

    def _output(self, count: int) -> torch.Tensor:
        shape = (count, *self._shape)
        try:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        nbytes = torch.empty(shape, dtype=self._dtype, device="meta").nbytes
        raise _batch_too_large(nbytes, count, self._device)

    def _halve(self) -> None:
        if self.micro_batch == 1:
            raise DeviceMemoryError(
                f"one sample does not fit {self._device} in the frozen layers; choose a later split (--split freeze)"
            )
        self.micro_batch //= 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _batch_too_large(nbytes: int, samples: int, device: torch.device) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"the features of a training batch ({samples} samples, {nbytes} bytes) do not fit {device}; "
        "choose a smaller --bs or a freeze with smaller outputs"
    )
