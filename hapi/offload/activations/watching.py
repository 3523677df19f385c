"""Observation of the memory that a pass takes, operator by operator, forward and backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hapi.allocator import bytes_in_use
from hapi.offload.activations.compiling import ObservingMode
from hapi.offload.activations.tracing import PassTracer
from hapi.offload.layer_memory import Working
from hapi.offload.loop.gradients import OffloadedGradient
from hapi.process.free_memory import resident_bytes


class Moment(Enum):
    """Part of an iteration."""

    FORWARD = "a layer's forward pass"
    AFTER = "between a layer's forward pass and the next one, or backward"
    BACKWARD = "a layer's backward pass"


class MemoryWatch:
    """Looks at the memory in use after each operator, from the model's first layer until its gradients are there.

    On a CPU an operator's own temporaries are not seen. On a GPU they are: the allocator tells its highest number since
    the last look, which begins anew then (``torch.cuda.reset_peak_memory_stats``). A CUDA graph's inside is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch nothing yet."""
        self._model, self._device = model, _gpu_of(model)
        self._before = self._gradients_before = 0
        self._phase: tuple[Moment, int] | None = None
        self._working: dict[tuple[Moment, int], int] = {}
        self.working_now = 0
        """Bytes in use beside saved tensors at the last look."""
        self._output: dict[int, int] = {}
        self.is_begun = self._is_paused = False
        self._mode = _Operators(self.probe)
        self.tracer = PassTracer()
        self.with_bytes: Callable[[Callable[[int], None]], None] = lambda measure: measure(0)
        """Calls with the stored bytes on the device, while they do not change."""

    def begin(self) -> None:
        """Begin a pass: what is in use now is not the passes'."""
        if not self.is_begun:
            self.is_begun = True
            gc.collect()  # what is garbage now would be freed within the pass
            self._before, self._gradients_before = taken_bytes(self._model), self._gradients()
            self._forget_highest()
        if not _get_current_dispatch_mode_stack():  # beside a mode of the loop's own layers alone are seen
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Watch no operator any more; while a mode that began later goes on, or backward, they pass unseen."""
        self._phase = None
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def at(self, moment: Moment, layer: int) -> None:
        """Count what comes as this part of the iteration."""
        self._phase = moment, layer
        self.probe()

    def put_out(self, layer: int, nbytes: int) -> None:
        """Note the bytes of a layer's output."""
        self._output[layer] = max(nbytes, self._output.get(layer, 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at operators of the swapping itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._forget_highest()

    def probe(self) -> None:
        """Look at the memory in use now; what an optimiser takes after backward is no pass's."""
        if self._phase is None or self._is_paused:
            return
        if self._phase[0] is not Moment.BACKWARD or torch._C._current_graph_task_id() >= 0:
            self.with_bytes(self._note)

    def working(self, layer: int) -> Working:
        """Return what was seen of one layer, by its number."""
        return Working(
            forward=self._working.get((Moment.FORWARD, layer), 0),
            after=self._working.get((Moment.AFTER, layer), 0),
            backward=self._working.get((Moment.BACKWARD, layer), 0),
            output=self._output.get(layer, 0),
        )

    def _note(self, live: int) -> None:
        phase = self._phase
        if phase is None:
            return
        gradients = max(0, self._gradients() - self._gradients_before)
        self.working_now = max(0, self._highest() - self._before - live - gradients)
        self._working[phase] = max(self.working_now, self._working.get(phase, 0))
        moment, layer = phase
        self.tracer.use(layer, self.working_now, is_backward=moment is Moment.BACKWARD)

    def _highest(self) -> int:
        """Most bytes in use since the last look, where that is told; else those in use now."""
        if self._device is None:
            return taken_bytes(self._model)
        highest = torch.cuda.max_memory_allocated(self._device)
        self._forget_highest()
        return highest

    def _forget_highest(self) -> None:
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _gradients(self) -> int:
        """Bytes of the parameters' gradients that are in memory."""
        found = (parameter.grad for parameter in self._model.parameters())
        return sum(
            grad.source.bytes_in_memory if isinstance(grad, OffloadedGradient) else grad.nbytes
            for grad in found
            if grad is not None
        )


class _Operators(ObservingMode):
    """Calls a function after each operator."""

    def __init__(self, after: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._after = after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        result = func(*args, **(kwargs or {}))
        self._after()
        return result


def _gpu_of(model: nn.Module) -> torch.device | None:
    tensor = next(model.parameters(), None)
    return tensor.device if tensor is not None and tensor.device.type == "cuda" else None


def taken_bytes(model: nn.Module) -> int:
    """Return the bytes that are in use where the model is: a GPU's tensors, or all of this process."""
    device = _gpu_of(model)
    if device is not None:
        return torch.cuda.memory_allocated(device)
    return bytes_in_use() or resident_bytes()
