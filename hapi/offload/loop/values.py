"""Values in the order of memory, and a watch for changes of them that torch does not count."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import nn

from hapi.arrays import Bytes

_WHOLE_STEPS = 3
"""So many times all values are compared: what a loop does, it does in its first steps."""
_SAMPLE = 1024
"""Elements that are compared afterwards, further ones each time."""


class ValueWatch:
    """Notices that a parameter's values were changed through ``parameter.data``, which no version tells, and that they
    were changed between backward and step.

    The first is found by all values in the first steps, then by some of them and by their address. On a GPU only the
    address counts: a look at values would wait for it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        """Look at the values as they are."""
        self._parameter = parameter
        self._settled = 0
        self._span = slice(None)
        self._values: Bytes | None = None
        """Their bytes, [elements, bytes of one]: no operator is needed to see them."""
        self._mark: tuple[int, int] | None = None
        self._version_at_gradient: int | None = None
        self.settle()

    def settle(self) -> None:
        """Take the values for those that are expected from now on."""
        if self._settled >= _WHOLE_STEPS:
            start = (self._settled * 7919 * _SAMPLE) % max(self._parameter.numel(), 1)
            self._span = slice(start, start + _SAMPLE)
        self._settled += 1
        self._mark = self._seen()
        self._version_at_gradient = None

    def is_met(self) -> bool:
        """Return whether the values are the expected ones, as far as it looks."""
        return self._seen() == self._mark

    def note_gradient(self) -> None:
        """Remember that the parameter has a gradient, which is that of its present values."""
        self._version_at_gradient = self._parameter._version

    def has_moved(self) -> bool:
        """Return whether the values were changed since :meth:`note_gradient`."""
        return self._version_at_gradient not in (None, self._parameter._version)

    def _seen(self) -> tuple[int, int]:
        parameter, address = self._parameter, self._parameter.data_ptr()
        if not parameter.is_cpu or not parameter.numel():
            return address, 0
        if self._values is None or self._values.ctypes.data != address:
            self._values = bytes_of(flat_view(parameter.detach())).reshape(-1, parameter.itemsize)
        return address, xxhash.xxh3_64_intdigest(self._values[self._span].data)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of memory, sharing it."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` in the order of the parameter's memory; itself where it has it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor on the CPU, shared."""
    found: Bytes = tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return found
