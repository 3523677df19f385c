"""One compute device: one forward at a time, on a thread of its own, with recovery from out-of-memory.

A single thread keeps CUDA's current stream and the CPU's intra-op threads to one owner, so that concurrent
requests share the device in turns (HAPI, section 4.3: the GPU is time-shared, a forward is not parallel).
On CUDA the copy to the host runs on a second stream from pinned memory, under the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hapi.clocks import StageClock
from hapi.errors import DeviceMemoryError
from hapi.models.devices import event_on, exact_arithmetic, finish, is_out_of_memory


@dataclass(frozen=True)
class Running:
    """A forward pass that was begun."""

    _future: Future[tuple[int, torch.cuda.Event | None]]
    _clock: StageClock

    def result(self) -> int:
        """Wait until the output is there; the batch size that fitted.

        Raises :class:`DeviceMemoryError` when even one sample does not fit.
        """
        batch, ready = self._future.result()
        if ready is not None:
            with self._clock.stage("copy_out"):
                ready.synchronize()
        return batch


class Device:
    """Runs frozen layers; thread-safe.

    It remembers, per (layers, input shape), the largest batch that did not run out of memory after a larger one
    did. ``relieve`` gives back memory that can be done without and returns the bytes; it is asked before one
    sample is said not to fit. On a GPU, float32 is exact from now on, see :func:`exact_arithmetic`.
    """

    def __init__(self, device: torch.device, relieve: Callable[[], int] = lambda: 0) -> None:
        exact_arithmetic(device)
        self.device = device
        self.out_of_memory_caught = 0
        self._relieve = relieve
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"hapi-{device}")
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ceilings: dict[Any, int] = {}

    def begin(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        output: torch.Tensor,
        *,
        key: Any,
        clock: StageClock,
    ) -> Running:
        """Begin to write ``layers(inputs)`` into ``output`` (host memory, batch first).

        ``key`` identifies layers and input shape for what is remembered about memory.
        """
        asked = time.monotonic()
        return Running(self._pool.submit(self._forward, layers, inputs, output, key, asked, clock), clock)

    def _forward(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        output: torch.Tensor,
        key: Any,
        asked: float,
        clock: StageClock,
    ) -> tuple[int, torch.cuda.Event | None]:
        clock.add("device_wait", time.monotonic() - asked)
        count = inputs.shape[0]
        batch = min(count, self._ceilings.get(key, count))
        relieved = False
        while True:
            try:
                with clock.stage("forward"):
                    return batch, self._run(layers, inputs, output, batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.out_of_memory_caught += 1
            # Only here, after the handler, are the tensors gone that the error's frames held.
            if batch > 1:
                batch = self._ceilings[key] = batch // 2
            elif relieved or not self._relieve():
                raise DeviceMemoryError(
                    f"one sample of shape {tuple(inputs.shape[1:])} does not fit {self.device}; "
                    "choose an earlier split or a smaller input"
                )
            else:
                relieved = True
            if self._copy_stream is not None:
                torch.cuda.empty_cache()

    def _run(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        output: torch.Tensor,
        batch: int,
    ) -> torch.cuda.Event | None:
        ready = None
        with torch.inference_mode():
            for start in range(0, inputs.shape[0], batch):
                x = inputs[start : start + batch].to(self.device, non_blocking=True)
                y = layers(x)
                ready = self._copy_out(y, output[start : start + batch])
        finish(self.device)  # so that the stage's seconds are the device's
        return ready

    def _copy_out(self, y: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Copy ``y`` to the host under whatever the device does next; the event says when it is there."""
        if self._copy_stream is None:
            target.copy_(y)
            return None
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            target.copy_(y, non_blocking=True)
        y.record_stream(self._copy_stream)  # its memory is not given out again before the copy has ended
        return event_on(self._copy_stream)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, pinned when the device is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._copy_stream is not None)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in pinned memory when the device is a GPU, else itself."""
        return tensor.pin_memory() if self._copy_stream is not None else tensor

    def memory_bytes(self) -> int:
        """Bytes that torch holds on the device now (0 on the CPU, where the process's size tells)."""
        return torch.cuda.memory_allocated(self.device) if self._copy_stream is not None else 0

    def close(self) -> None:
        """Stop the thread after the forward that is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
