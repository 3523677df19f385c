"""One compute device: one forward at a time, on a thread of its own, with recovery from out-of-memory.

A single thread keeps CUDA's current stream and the CPU's intra-op threads to one owner, so that concurrent
requests share the device in turns (HAPI, section 4.3: the GPU is time-shared, a forward is not parallel).
On CUDA the copy to the host runs on a second stream from pinned memory, under the next forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hapi.clocks import StageClock
from hapi.errors import DeviceMemoryError, UsageError


def resolve_device(name: str) -> torch.device:
    """The torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; :class:`UsageError` when there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UsageError(f"device {name!r}: this machine has {count} CUDA device(s)")
        return torch.device("cuda", device.index or 0)
    return device


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed for lack of memory, on a GPU or on the host."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class Device:
    """Runs frozen layers; thread-safe.

    ``batch_ceilings`` remembers, per (layers, input shape), the largest batch that did not run out of memory
    after a larger one did.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_of_memory_caught = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"hapi-{device}")
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ceilings: dict[Any, int] = {}
        self._lock = threading.Lock()

    def forward(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        output: torch.Tensor,
        *,
        key: Any,
        clock: StageClock,
    ) -> int:
        """Write ``layers(inputs)`` into ``output`` (host memory, batch first); returns the batch size that fitted.

        ``key`` identifies layers and input shape for what is remembered about memory. Raises
        :class:`DeviceMemoryError` when even one sample does not fit.
        """
        asked = time.monotonic()
        future = self._pool.submit(self._forward, layers, inputs, output, key, asked, clock)
        batch, ready = future.result()
        if ready is not None:
            with clock.stage("copy_out"):
                ready.synchronize()
        return batch

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
        while True:
            try:
                with clock.stage("forward"):
                    return batch, self._run(layers, inputs, output, batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.out_of_memory_caught += 1
            if self._copy_stream is not None:
                torch.cuda.empty_cache()
            if batch == 1:
                raise DeviceMemoryError(
                    f"one sample of shape {tuple(inputs.shape[1:])} does not fit {self.device}; "
                    "choose an earlier split or a smaller input"
                )
            batch = max(1, batch // 2)
            with self._lock:
                self._ceilings[key] = batch

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
        if self._copy_stream is not None:
            torch.cuda.current_stream(
                self.device
            ).synchronize()  # so that the stage's seconds are the device's
        return ready

    def _copy_out(self, y: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        if self._copy_stream is None:
            target.copy_(y)
            return None
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            target.copy_(y, non_blocking=True)
            y.record_stream(self._copy_stream)
            ready = torch.cuda.Event()
            ready.record(self._copy_stream)
        return ready

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
