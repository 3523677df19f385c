"""The client's memory: its budget, and its share of the frozen layers in micro-batches that fit it."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hapi.errors import DeviceMemoryError
from hapi.models.devices import free_bytes, give_back_unused
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.precision import take_weights
from hapi.models.warm_up import warm_up_libraries
from hapi.process.memory_errors import is_out_of_memory

_GPU_SHARE, _HOST_SHARE = 0.9, 0.8
"""Share of the memory that is free when a job begins, that it plans with: others take some, allocators lose
some. Freed host memory stays with the process, and gaps between two pieces in use need not fit the next one.
"""
EVEN_ROWS = 16
"""Samples of a forward pass from which on libraries give equal bits whatever their number."""
_PROC = Path("/proc/self")


@dataclass
class MicroBatch:
    """Samples at a time through the frozen layers, shared by all splits; halved for good when they do not
    fit.
    """

    size: int


class MemoryBudget:
    """The client's memory: bytes of device memory on a GPU, of this process's growth on a CPU.

    Without a user's limit, the free memory counts for planning and nothing is enforced. With one, a GPU's
    allocator refuses more, and on a CPU the peak is checked after each piece of work (Linux).
    """

    def __init__(self, limit: int | None, device: torch.device) -> None:
        self._device = device
        self.enforced = limit is not None
        self._highest = 0
        self._process_highest = 0
        self._before = self._code = 0
        if device.type == "cpu":
            warm_up_libraries()
            self._forget_peak()
            self._before, self._code = status_bytes("VmRSS"), status_bytes("RssFile")
        free = free_bytes(device)
        share = _GPU_SHARE if device.type == "cuda" else _HOST_SHARE
        self.bytes = limit if limit is not None or free is None else int(free * share)
        """The budget; None where the system does not tell what is free."""
        if limit is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)

    def leave(self, taken: int, sharers: int = 1) -> None:
        """Leave what other processes of this machine take of a CPU's memory; a user's limit stays.

        Args:
            taken: bytes that another process takes.
            sharers: processes like this one, which share what is left.
        """
        if not self.enforced and self.bytes is not None and self._device.type == "cpu":
            self.bytes = max(1, (self.bytes - taken) // sharers)

    def begin(self) -> None:
        """Forget earlier use: the peak counts from now on."""
        if self.enforced and self._device.type == "cpu":
            self._highest = max(self._highest, self.peak())
            self._forget_peak()

    def _forget_peak(self) -> None:
        self._process_highest = self.process_highest()
        with contextlib.suppress(OSError):  # not Linux, or a kernel that was built without it
            (_PROC / "clear_refs").write_text("5")

    def exceeded(self) -> bool:
        """Return whether a CPU's budget was exceeded since :meth:`begin`."""
        if not self.enforced or self.bytes is None or self._device.type != "cpu":
            return False
        return self.peak() > self.bytes

    def highest(self) -> int:
        """Most bytes since the job began."""
        return max(self._highest, self.peak())

    def process_highest(self) -> int:
        """Most bytes of the process since it began, which the system no longer tells after :meth:`begin`."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(self._process_highest, peak if sys.platform == "darwin" else peak * 1024)

    def peak(self) -> int:
        """Most bytes since :meth:`begin`, or without it since the job began (on a GPU since the process did)."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        # Libraries' code that is read meanwhile is no memory of the job's: the system takes it back when it must.
        code = max(0, status_bytes("RssFile") - self._code)
        return max(0, status_bytes("VmHWM") - self._before - code)


def status_bytes(name: str, process: str = "self") -> int:
    """Return a size from Linux's process status; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC.with_name(process) / "status").read_text(encoding="ascii").splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


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


def move_weights(model: LayeredModel, device: torch.device, start: int, stop: int) -> None:
    """Load the weights that layers start+1..stop read on ``device``.

    Args:
        model: its layers; their weights are moved, or taken from the model whose layers these are in fewer bits.
        device: of this side.
        start: number of layers before the first one.
        stop: the last layer.

    Raises:
        DeviceMemoryError: they do not fit.
    """
    try:
        take_weights(model, start, stop, device)
        model.to(device, start, stop)
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise DeviceMemoryError(
        f"the weights of layers {start + 1} to {stop} do not fit {device}; choose a later split (--split freeze), a "
        "smaller model, or raise --memory"
    )


class FrozenSuffix:
    """Layers split+1..last_split: eval mode, no gradient, a micro-batch at a time.

    The result is the same as in one piece, since frozen layers treat each sample by itself; the memory is that of
    a micro-batch plus the outputs. The micro-batch is halved, and stays so, when the device runs out of memory or
    the budget is exceeded.
    """

    def __init__(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        micro_batch: MicroBatch,
        device: torch.device,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._budget = budget or MemoryBudget(None, device)
        self._micro_batch = micro_batch

    def __call__(
        self, features: torch.Tensor, layers: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """[B, ...] host features to [B, ...] on the device; :class:`DeviceMemoryError` if they do not fit.

        ``layers``: these layers in another form, to be timed. On a GPU this returns before the device is done;
        ``features`` must stay as they are until then.
        """
        output = self._output(len(features))
        start = 0
        while start < len(features):
            rows = slice(start, start + self._next_piece(len(features) - start))
            self._budget.begin()
            try:
                self._step(layers or self._layers, features[rows], output[rows])
                start = rows.stop
                if not self._budget.exceeded():
                    continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Only here, after the handler, are the tensors gone that the error's frames held.
            self._halve()
        return output

    def _next_piece(self, left: int) -> int:
        """Samples of the next micro-batch: about as many as in the others, since libraries give other bits for few."""
        pieces = -(-left // self._micro_batch.size)
        return min(self._micro_batch.size, -(-left // (pieces * EVEN_ROWS)) * EVEN_ROWS)

    @torch.no_grad()
    def _step(
        self, layers: Callable[[torch.Tensor], torch.Tensor], features: torch.Tensor, output: torch.Tensor
    ) -> None:
        output.copy_(layers(features.to(self._device, non_blocking=True)))

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
        if self._micro_batch.size == 1:
            raise DeviceMemoryError(
                f"one sample does not fit {self._device} in the frozen layers; choose a later split "
                "(--split freeze), or raise --memory"
            )
        self._micro_batch.size //= 2
        give_back_unused(self._device)


def _batch_too_large(nbytes: int, samples: int, device: torch.device) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"the features of a training batch ({samples} samples, {nbytes} bytes) do not fit {device}; "
        "choose a smaller --bs or a freeze with smaller outputs"
    )
