"""This machine's share of a profile, measured on synthetic data in a second or two.

Small models are timed layer by layer. In large ones as many layers are timed as the budget allows, the
largest first. The seconds of the others are predicted from their operations and bytes, and scaled by how the
timed ones of their kind compare with the same prediction. The profile's notes say which it was.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
from torch import nn

from hapi import __version__
from hapi.errors import ModelError
from hapi.models.devices import finish
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.views import shadow
from hapi.process.processors import processor_count
from hapi.profiler.fit import Tier
from hapi.profiler.machine import Machine
from hapi.profiler.profile import LinkProfile, Profile, ServerProfile
from hapi.profiler.sizes import sizes_of
from hapi.profiler.timing import work_clock
from hapi.profiler.work import LayerWork, fill, layer_work

STORE_BYTES_PER_SECOND = 500e6
"""Assumed for the store behind the server; OpenStack Swift on loopback gave 496 MB/s for large objects."""
REQUEST_SECONDS = 3e-3
"""Assumed for a request's way and first byte; Swift took about 3 ms a request."""
_BATCHES = (16, 4, 2, 1)
"""Samples to time with, the first that the budget allows: flat from 16 on (HAPI, section 4.4)."""
_TRAINED_BATCHES = (16, 4, 2)
"""Batch sizes of trained layers; not 1, which a BatchNorm in training refuses."""
_SMALL = 0.3
"""Layers below this share of the mean layer's work are predicted: their time is mostly torch's overhead."""
_RUNS = 3
"""Runs: one to warm up, and two whose mean counts; there is a second or two for everything."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Facts that cannot be measured on this machine alone."""

    stored_bytes: int | None = None
    """Bytes of a stored JPEG; None for samples stored as float32 tensors, which need no decoding."""
    bits_per_second: float = 1e9
    variation: float = 0.0
    server_speed: float = 1.0
    """Speed of the server, as a multiple of this machine's."""
    concurrency: int = 4
    cos_batch: int = 16
    waiting_seconds: float = 0.0


def measure(
    model: LayeredModel,
    title: str,
    freeze: int,
    conditions: Conditions,
    *,
    machine: Machine,
    device: torch.device | None = None,
    budget: float = 0.8,
) -> Profile:
    """Return the profile of ``model``, both tiers like ``machine`` but for ``server_speed``.

    Args:
        model: its layers; may be on the meta device, and stays as it is.
        title: the model's name in the profile.
        freeze: last frozen layer.
        conditions: link, server and samples.
        machine: this machine's constants.
        device: that runs the layers; None for the machine's own.
        budget: seconds for timing layers.

    Raises:
        ModelError: the model does not run, or its result has no gradient.
    """
    device = device or torch.device("cpu")
    encoded = conditions.stored_bytes is not None
    work = layer_work(model, model.last_split(freeze), device.type)
    sizes = sizes_of(
        model,
        title,
        freeze,
        stored_bytes=model.output_bytes()[0] if conditions.stored_bytes is None else conditions.stored_bytes,
        encoded=encoded,
        client=Tier(device=machine.device, processors=machine.processors, threads=machine.threads),
        work=work,
    )
    timer = _Timer(model, work, machine, device)
    try:
        forward = timer.layers(budget * 0.7)
        step, update, step_note = timer.step(sizes.last_split, forward, budget * 0.3)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the model cannot be timed: {reason}") from None
    speed = conditions.server_speed
    return Profile(
        model=title,
        freeze=freeze,
        last_split=sizes.last_split,
        layers=tuple(
            replace(layer, server_seconds=seconds / speed, client_seconds=seconds)
            for layer, seconds in zip(sizes.layers, forward, strict=True)
        ),
        samples=sizes.samples,
        server=_server(conditions, sizes.samples.stored_bytes),
        server_tier=machine.faster(speed).tier(server=True, encoded=encoded),
        client_tier=machine.tier(server=False, encoded=encoded),
        link=LinkProfile(
            bits_per_second=conditions.bits_per_second,
            variation=conditions.variation,
            request_seconds=REQUEST_SECONDS,
        ),
        step_seconds=step,
        update_seconds=update,
        optimizer_bytes_per_parameter_byte=sizes.optimizer_bytes_per_parameter_byte,
        notes=(timer.note, step_note, *_notes(machine)),
    )


def _server(conditions: Conditions, stored_bytes: float) -> ServerProfile:
    """The server under ``conditions``, for samples of ``stored_bytes`` bytes in the mean."""
    return ServerProfile(
        read_seconds=stored_bytes / STORE_BYTES_PER_SECOND,
        model_load_seconds=0.0,
        concurrency=conditions.concurrency,
        waiting_seconds=conditions.waiting_seconds,
        cos_batch=conditions.cos_batch,
    )


def _notes(machine: Machine) -> tuple[str, ...]:
    kind = machine.device_name if machine.device == "cuda" else f"{machine.threads} threads"
    measured = (
        f"measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {machine.device} ({kind}), {platform.machine()}, "
        f"torch {torch.__version__}, hapi {__version__}"
    )
    assumed = (
        f"assumed: the store gives {STORE_BYTES_PER_SECOND / 1e6:.0f} MB/s, a request costs "
        f"{REQUEST_SECONDS * 1e3:.0f} ms, the front stays loaded, the server is built like this machine"
    )
    return (measured, *_busy(), assumed)


def _busy() -> tuple[str, ...]:
    """A line about other work on this machine, if there is so much that what was measured may be wrong."""
    load, processors = os.getloadavg()[0], processor_count()
    if load <= processors:
        return ()
    busy = f"this machine was busy (load {load:.1f} on {processors} processors)"
    return (f"{busy}: seconds may be too long; measure again (--remeasure) when it is idle",)


_STEP_PASSES = 10
"""Over the trained weights in a timed step: fresh gradients are written (the system clears their pages first) and read,
momentum and weights read and written."""


class _Timer:
    """Times layers within a budget, and predicts those that do not fit into it."""

    def __init__(
        self, model: LayeredModel, work: Sequence[LayerWork], machine: Machine, device: torch.device
    ) -> None:
        self._model = model.over(_twin(model.module))
        self._work, self._device = work, device
        self._flops, self._traffic = machine.flops_per_second, machine.copy_bytes_per_second
        self.note = ""

    def predicted(self, layer: int) -> float:
        """Seconds a sample of layer ``layer`` (from 1) by its operations and bytes."""
        work = self._work[layer - 1]
        moved = work.traffic_bytes + self._model.layers[layer - 1].parameter_bytes / _BATCHES[0]
        return work.flops / self._flops + moved / self._traffic

    def layers(self, budget: float) -> list[float]:
        """Forward seconds of one sample, for each layer."""
        count = len(self._model)
        predicted = [self.predicted(i) for i in range(1, count + 1)]
        measured: dict[int, float] = {}
        end = time.perf_counter() + budget
        worthwhile = [i for i in range(1, count + 1) if predicted[i - 1] >= _SMALL * sum(predicted) / count]
        for layer in sorted(worthwhile, key=lambda i: -predicted[i - 1]):
            left = end - time.perf_counter()
            if left <= 0:
                break
            batch = self._affordable(layer - 1, layer, predicted[layer - 1] * _RUNS, left / 2, _BATCHES)
            if batch:
                measured[layer] = self._forward(layer, batch)
        share = sum(predicted[i - 1] for i in measured) / max(sum(predicted), 1e-30)
        self.note = f"forward seconds: {len(measured)} of {count} layers timed ({share:.0%} of the work)" + (
            "" if len(measured) == count else ", the others scaled by operations and bytes"
        )
        return [
            measured[i] if i in measured else predicted[i - 1] * self._factor(i, measured)
            for i in range(1, count + 1)
        ]

    def _factor(self, layer: int, measured: dict[int, float]) -> float:
        """Factor by which the timed layers of this one's kind took longer than predicted."""
        same_kind = [
            i for i in measured if bool(self._work[i - 1].flops) == bool(self._work[layer - 1].flops)
        ]
        chosen = same_kind or list(measured)
        if not chosen:
            return 1.0
        return sum(measured[i] for i in chosen) / sum(self.predicted(i) for i in chosen)

    def _affordable(
        self, start: int, stop: int, seconds: float, limit: float, batches: Sequence[int], passes: int = 4
    ) -> int:
        """The largest batch whose ``seconds`` a sample, and ``passes`` over weights, stay below ``limit``; or 0."""
        weights = sum(layer.parameter_bytes for layer in self._model.layers[start:stop])
        left = limit - passes * weights / self._traffic
        return next((batch for batch in batches if batch * seconds <= left), 0)

    def _input(self, before: int, batch: int) -> torch.Tensor:
        shape, dtype = self._model.output_shapes()[before], self._model.output_dtypes()[before]
        return torch.rand((batch, *shape), device=self._device).to(dtype)

    def _forward(self, layer: int, batch: int) -> float:
        fill(self._model, layer - 1, layer, self._device)
        segment = self._model.segment(layer - 1, layer, frozen=True).to(self._device)
        x = self._input(layer - 1, batch)
        seconds = _timed(lambda: segment(x), self._device) / batch
        self._model.release(0, 0)
        return seconds

    def step(self, last_split: int, forward: Sequence[float], budget: float) -> tuple[float, float, str]:
        """(seconds a sample of forward and backward pass after ``last_split``, seconds of an update, a note)."""
        stop = len(self._model)
        guess = 3 * sum(forward[last_split:])
        batch = self._affordable(
            last_split, stop, guess * _RUNS, budget, _TRAINED_BATCHES, _STEP_PASSES * _RUNS
        )
        weights = sum(layer.parameter_bytes for layer in self._model.layers[last_split:])
        if not batch:
            # Read weight, gradient and momentum, write weight and momentum; the copy rate counts both ways.
            update = 5 * weights / self._traffic
            return guess, update, "trained part: three times its forward pass (backward is about two)"
        fill(self._model, last_split, stop, self._device)
        part = self._model.segment(last_split, stop, frozen=False).to(self._device)
        parameters = [p for p in part.parameters() if p.requires_grad]
        momenta = [torch.zeros_like(p) for p in parameters]
        x = self._input(last_split, batch)

        def once() -> None:
            for p in parameters:
                p.grad = None
            part(x).square().mean().backward()

        def update_weights() -> None:
            # What torch.optim.SGD does with momentum; creating that one imports torch's compiler, 1.3 s.
            with torch.no_grad():
                for p, momentum in zip(parameters, momenta, strict=True):
                    if p.grad is not None:
                        momentum.mul_(0.9).add_(p.grad)
                        p.add_(momentum, alpha=-1e-6)

        step = _timed(once, self._device) / batch
        update = _timed(update_weights, self._device)
        self._model.release(0, 0)
        return step, update, f"trained part: timed with {batch} samples, SGD with momentum"


def _twin(module: nn.Module) -> nn.Module:
    """A copy to put weights into: what has none is shared, as copying a large model takes a third of a second."""
    copies: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        return copies.setdefault(id(tensor), copy.deepcopy(tensor))

    return shadow(module, {}, own)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work``, after a run to warm up; other processes lengthen them only where several threads work."""
    seconds, clock = [], work_clock(device)
    for _ in range(_RUNS):
        started = clock()
        work()
        finish(device)
        seconds.append(clock() - started)
    return statistics.median(seconds[1:])
