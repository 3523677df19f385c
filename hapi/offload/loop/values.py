"""Values in the order of memory, and a watch for changes of them that torch does not count."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import nn

from hapi.arrays import Bytes

_WHOLE_STEPS = 3
"""So many times all values are compared: what a loop does, it does in its first steps."""
_SAMPLE = 1 << 14
"""Elements that are compared afterwards, further ones each time; a parameter that has no more is compared whole. They
take some microseconds: digests of a processor's caches are fast."""


class ValueWatch:
    """Notices that a parameter's values were changed through ``parameter.data``, which no version tells, and that they
    were changed between backward and step.

    The first is found by all values in the first steps, then by some of many and by their address. On a GPU only the
    address counts: a look at values would wait for it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        """Look at the values as they are."""
        self._parameter = parameter
        self._settled = 0
        self._was_changed = False
        """Whether a change was found: then all values are compared from then on."""
        self._span = slice(None)
        self._values: Bytes | None = None
        """Their bytes, [elements, bytes of one]: no operator is needed to see them."""
        self._mark: tuple[int, int] | None = None
        self._version_at_gradient: int | None = None
        self._before: dict[int, int | None] = {}
        """Digests of the values that were computed with ahead of the step, by their first elements."""
        self.settle()

    @property
    def views(self) -> int:
        """Views of the values that it holds."""
        return 0 if self._values is None else 1

    def settle(self, *, is_step: bool = True) -> None:
        """Take the values for those that are expected from now on; ``is_step`` is whether a step has made them."""
        self._span, elements = slice(None), self._parameter.numel()
        if self._settled >= _WHOLE_STEPS and not self._was_changed and elements > _SAMPLE:
            start = (self._settled * 7919 * _SAMPLE) % elements
            self._span = slice(start, start + _SAMPLE)
        self._settled += is_step
        self._mark = self._seen()
        self._version_at_gradient = None
        self._before.clear()

    def note_before(self, start: int, values: torch.Tensor | None) -> None:
        """Remember the values from element ``start`` that new ones are computed from; None for wrong ones."""
        self._before[start] = None if values is None else xxhash.xxh3_64_intdigest(bytes_of(values).data)

    def is_noted(self, start: int) -> bool:
        """Return whether new values were computed for those from element ``start``."""
        return start in self._before

    def were(self, start: int, values: torch.Tensor) -> bool:
        """Return whether these are the values that were remembered, or none were."""
        digest = xxhash.xxh3_64_intdigest(bytes_of(values).data)
        return start not in self._before or self._before[start] == digest

    def is_met(self) -> bool:
        """Return whether the values are the expected ones, as far as it looks."""
        is_met = self._seen() == self._mark
        self._was_changed = self._was_changed or not is_met
        return is_met

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


Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, type and device of a parameter."""


def form_of(parameter: torch.Tensor) -> Form:
    """Return what its states and their order depend on; strides of single elements say nothing."""
    strides = tuple(step for step, size in zip(parameter.stride(), parameter.shape, strict=True) if size > 1)
    return parameter.shape, strides, parameter.dtype, parameter.device


def in_words(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    """Say a form, for people."""
    return f"{tuple(shape)} with strides {strides} in {dtype} on {device}"


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


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a 2-norm as ``clip_grad_norm_`` computes it by default: a GPU's operator adds in another order."""
    if gradient.is_cuda:
        return torch._foreach_norm([gradient], 2.0)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, 2.0)
    return norm
