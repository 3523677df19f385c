"""Measurement of one iteration: operations, seconds and saved bytes of each layer, and rates of the tiers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hapi.cache.disk_rates import measure_disk
from hapi.models.warm_up import warm_up_libraries
from hapi.offload.activations.saved import Key
from hapi.offload.activations.side_effects import LayerOperators, SideEffects
from hapi.offload.activations.spill import SpillFiles
from hapi.offload.activations.watching import MemoryWatch, Moment
from hapi.offload.layer_memory import GradientRoom, Layer
from hapi.offload.pass_memory import Event
from hapi.offload.planner import Machine
from hapi.process.free_memory import host_free_bytes

_LINK_BYTES = 64 << 20
_HOST_SHARE = 0.5
"""Share of the free host memory that a GPU's activations may take."""
_CLOCK_SECONDS = 1e-6
"""A measured second below this says nothing about a layer."""


@dataclass
class LayerMeasure:
    """One layer's costs: the most of any forward pass of the iteration, calls of a pass added up."""

    flops: float = 0.0
    seconds: float = 0.0
    saved_bytes: int = 0
    input_bytes: int = 0
    tensors: list[int] = field(default_factory=list)
    """Bytes of each tensor that it is the first to save, in the pass that saved most."""
    side_effect: str | None = None
    """Why a second forward pass would do otherwise than the first."""


class IterationMeasure:
    """Costs of the layers, gathered while a model runs."""

    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
        """Measure layers of a model, by their number in the list."""
        self._model, self._layers = model, layers
        self.watch = MemoryWatch(model)
        self.order: list[int] = []
        """Numbers of the layers in the order of their first calls."""
        self.highest = [LayerMeasure() for _ in layers]
        self._now = [LayerMeasure() for _ in layers]
        self.largest_bytes = 0
        self._between: set[Key] = set()

    def begin_pass(self) -> None:
        """Begin a forward pass of the model."""
        if not self.order:
            # What torch takes at its first use is no pass's, and nothing that the loop counts or checkpoints.
            own = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            with _disable_current_modes(), own, LayerOperators():
                warm_up_libraries()
            for _, module in self._layers:
                SideEffects(module, ()).found()
        self._close_pass()
        self.watch.begin()

    def end(self) -> None:
        """End the iteration."""
        self.watch.end()
        self._close_pass()

    def _close_pass(self) -> None:
        for high, now in zip(self.highest, self._now, strict=True):
            high.flops = max(high.flops, now.flops)
            high.seconds = max(high.seconds, now.seconds)
            high.saved_bytes = max(high.saved_bytes, now.saved_bytes)
            high.input_bytes = max(high.input_bytes, now.input_bytes)
            high.tensors = max(high.tensors, now.tensors, key=sum)
            high.side_effect = high.side_effect or now.side_effect
        self._now = [LayerMeasure() for _ in self._layers]
        self._between.clear()

    def begin_call(self, layer: int, inputs: Mapping[Key, tuple[torch.Tensor, int | None]]) -> None:
        """Count the inputs of a layer as bytes between layers, each once in a pass.

        They stay saved when the layer is computed a second time, whether plain training saves them or not.

        Args:
            layer: its number.
            inputs: its input, each with the layer that has saved its bytes; None if none has so far.
        """
        self.watch.tracer.call(layer)
        self.watch.at(Moment.FORWARD, layer)
        now = self._now[layer]
        for key, (tensor, saver) in inputs.items():
            self.watch.tracer.put_in(layer, key, tensor)
            if key in self._between:
                continue
            self._between.add(key)
            now.input_bytes += key.extent.nbytes
            # Not saved so far: if the layer does not save it either, recomputing it frees so much less.
            self._now[layer if saver is None else saver].saved_bytes -= key.extent.nbytes

    def saved(self, layer: int, key: Key) -> None:
        """Count bytes that a layer is the first to save."""
        self._now[layer].saved_bytes += key.extent.nbytes
        self._now[layer].tensors.append(key.extent.nbytes)
        self.largest_bytes = max(self.largest_bytes, key.extent.nbytes)

    @contextmanager
    def call(self, layer: int, inputs: Sequence[torch.Tensor], waited: float) -> Iterator[list[float]]:
        """Measure one call of a layer.

        Args:
            layer: its number.
            inputs: tensors that it is given.
            waited: seconds that were waited for transfers before it.

        Yields:
            A list to put those waited after it into.
        """
        if layer not in self.order:
            self.order.append(layer)
        module, now = self._layers[layer][1], self._now[layer]
        with self.watch.paused():
            watched, operators = SideEffects(module, inputs), LayerOperators()
        after: list[float] = []
        started = time.perf_counter()
        with operators:
            yield after
        _synchronize(module)
        self.watch.at(Moment.AFTER, layer)
        now.seconds += max(0.0, time.perf_counter() - started - (after[0] - waited if after else 0.0))
        now.flops += operators.flops
        with self.watch.paused():
            now.side_effect = now.side_effect or operators.found or watched.found()

    def planned(self, reasons: Sequence[str | None], gradients: GradientRoom) -> tuple[list[Layer], float]:
        """Return the layers for the planner, in the order of the pass, and the measured operations a second.

        A layer without counted operations (elementwise ones are not counted) has those that its seconds stand for.

        Args:
            reasons: why each layer cannot be recomputed; None where it can.
            gradients: that are in memory for a while.
        """
        counted = [x for x in self.highest if x.flops and x.seconds > _CLOCK_SECONDS]
        seconds = sum(x.seconds for x in counted)
        rate = sum(x.flops for x in counted) / seconds if counted else 1e9
        layers: list[Layer] = []
        for number in self.order:
            x = self.highest[number]
            layers.append(
                Layer(
                    name=self._layers[number][0],
                    flops=x.flops or x.seconds * rate,
                    saved_bytes=max(0, x.saved_bytes),
                    input_bytes=x.input_bytes,
                    tensors=tuple(x.tensors),
                    recomputable=reasons[number] is None,
                    working=replace(
                        self.watch.working(number),
                        ahead=gradients.ahead,
                        waiting=gradients.waiting_beside(self._largest_gradient(number)),
                    ),
                )
            )
        return layers, rate

    def events(self) -> list[Event]:
        """Return what happened, layers by their places in :meth:`planned`."""
        return self.watch.tracer.events({number: place for place, number in enumerate(self.order)})

    def _largest_gradient(self, layer: int) -> int:
        trained = (x for x in self._layers[layer][1].parameters() if x.requires_grad)
        return max((parameter.nbytes for parameter in trained), default=0)


def measured_machine(
    thp_g: float,
    files: SpillFiles | None,
    device: torch.device,
    device_bytes: int,
    buffer_bytes: int,
    in_use_bytes: int,
) -> Machine:
    """Return the rates of this machine: those of the transfers that were done, or of a short probe.

    Args:
        thp_g: measured operations a second.
        files: the drives' files; None without a disk.
        device: of the model.
        device_bytes: memory for saved activations and buffers on it.
        buffer_bytes: most bytes on their way.
        in_use_bytes: most bytes that an operator still uses of what has left.
    """
    read = write = 0.0
    if files is not None:
        reading, writing = files.rates()
        if reading is None or writing is None:
            probes = [measure_disk(drive.folder) for drive in files.drives]
            reading = reading or sum(probe.read or 0.0 for probe in probes)
            writing = writing or sum(probe.write or 0.0 for probe in probes)
        read, write = reading, writing
    machine = Machine(
        thp_g=thp_g,
        bw_s2m=read,
        bw_m2s=write,
        device_bytes=device_bytes,
        buffer_bytes=buffer_bytes,
        in_use_bytes=in_use_bytes,
        drives=1 if files is None else len(files.drives),
    )
    if device.type != "cuda":
        return machine
    return replace(machine, bw_g=_link_rate(device), host_bytes=host_room(device))


def host_room(device: torch.device) -> int:
    """Return bytes of host memory for swapped activations, where the device has its own memory."""
    free = host_free_bytes() if device.type == "cuda" else None
    return int(_HOST_SHARE * free) if free else 0


def _link_rate(device: torch.device) -> float:
    """Bytes a second from a CUDA device to pinned memory."""
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return _LINK_BYTES / max(time.perf_counter() - started, _CLOCK_SECONDS)


def _synchronize(module: nn.Module) -> None:
    tensor = next(module.parameters(), None)
    if tensor is not None and tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
