"""The layers of one request on a device, with the memory that is reserved for it, and its forward passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hapi.arrays import Bytes
from hapi.clocks import StageClock
from hapi.models.tensors import tensor_bytes
from hapi.profiler.timing import TimedLayers
from hapi.server.batching.forward_memory import Key
from hapi.server.device.device import Device, PassPriority, Running
from hapi.server.device.memory_format import channels_last
from hapi.server.device.model_cache import FrozenPrefix


@dataclass(frozen=True)
class DeviceEngine:
    """Runs the forward passes of one request."""

    device: Device
    prefix: FrozenPrefix
    batch: int
    """COS batch."""
    key: Key
    """Layers and input shape, for what is remembered about memory."""
    priority: PassPriority
    clock: StageClock
    timed: TimedLayers | None = None
    """The layers one by one, if they are to be timed."""

    @property
    def layer_seconds(self) -> tuple[float, ...]:
        """Seconds of each layer so far; empty if they are not timed."""
        return () if self.timed is None else tuple(self.timed.seconds)

    def start(self, inputs: torch.Tensor) -> DevicePass:
        """Begin a forward pass over ``inputs``, float32 [n, ...] in host memory."""
        layers = self.timed or self.prefix.segment
        output = self.device.host_buffer((len(inputs), *self.prefix.output_shape), self.prefix.output_dtype)
        running = self.device.begin(
            channels_last(layers) if self.prefix.channels_last else layers,
            self.device.pinned(inputs),
            output,
            key=self.key,
            clock=self.clock,
            priority=self.priority,
        )
        return DevicePass(running, output)


@dataclass(frozen=True, eq=False)
class DevicePass:
    """One forward pass that was begun."""

    running: Running
    output: torch.Tensor

    def features(self) -> Bytes:
        """Wait for the pass; return its features, uint8 [n, bytes of a sample]."""
        self.running.result()
        return np.frombuffer(tensor_bytes(self.output), dtype=np.uint8).reshape(len(self.output), -1)

    def fitted(self) -> int:
        """Wait for the pass; return the batch, in samples, that fitted the memory."""
        return self.running.result()

    def stage(self) -> str:
        """Return the stage that it is in; empty when it is over."""
        return self.running.stage()

    def leave(self) -> None:
        """Drop the output: a pass that has not begun does not begin, one that has is waited for."""
        self.running.leave()
