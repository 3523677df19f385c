"""This machine's share of a profile, measured on synthetic data in a second or two.

Small models are timed layer by layer. Of large ones as many layers are timed as the budget allows, the largest first;
the seconds of the others are predicted from their operations and bytes, and scaled by how the timed ones of their
kind compare with the same prediction. The profile's notes say which it was.
"""

from __future__ import annotations

import copy
import io
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch
import xxhash
from PIL import Image

from hapi import __version__
from hapi.models.devices import finish
from hapi.models.layers import LayeredModel
from hapi.profiler.profile import (
    LayerProfile,
    LinkProfile,
    Profile,
    SampleProfile,
    ServerProfile,
    TierProfile,
)
from hapi.profiler.work import LayerWork, fill, layer_work
from hapi.storage.dataset import Samples
from hapi.storage.manifest import SampleLayout
from hapi.storage.transform import input_batch
from hapi.wire.references import TransformSpec

STORE_BYTES_PER_SECOND = 500e6
"""Assumed for the store behind the server; OpenStack Swift on loopback gave 496 MB/s for large objects."""
REQUEST_SECONDS = 3e-3
"""Assumed for a request's way and first byte; Swift took about 3 ms a request."""
_BATCHES = (16, 4, 2, 1)
"""Samples to time with, the first that the budget allows: flat from 16 on (HAPI, section 4.4)."""
_TRAINED_BATCHES = (16, 4, 2)
"""Not 1, which a BatchNorm that is trained refuses."""
_SMALL = 0.3
"""Layers below this share of the mean layer's work are predicted: their time is mostly torch's overhead."""
_RUNS = 3
"""One to warm up, and two whose mean counts: there is a second or two for everything."""
_PATTERN_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What cannot be measured on this machine alone."""

    stored_bytes: int | None = None
    """Bytes of a stored JPEG; None for samples stored as float32 tensors, which need no decoding."""
    bits_per_second: float = 1e9
    variation: float = 0.0
    server_speed: float = 1.0
    """How many times as fast as this machine the server is."""
    concurrency: int = 4
    cos_batch: int = 16
    waiting_seconds: float = 0.0


def measure(
    model: LayeredModel,
    title: str,
    freeze: int,
    conditions: Conditions,
    *,
    device: torch.device | None = None,
    budget: float = 0.8,
) -> Profile:
    """The profile of ``model`` frozen at ``freeze``, both tiers like this machine but for ``server_speed``.

    ``model`` may be on the meta device and stays as it is. ``budget``: seconds for timing layers.
    """
    device = device or torch.device("cpu")
    work = layer_work(model)
    timer = _Timer(model, work, device)
    forward = timer.layers(budget * 0.7)
    step, update, step_note = timer.step(freeze, forward, budget * 0.3)
    machine = _machine(model.input_shape, device, conditions.stored_bytes is not None)
    tensor_bytes = model.output_bytes()[0]
    stored = tensor_bytes if conditions.stored_bytes is None else conditions.stored_bytes
    speed = conditions.server_speed
    return Profile(
        model=title,
        freeze=freeze,
        last_split=model.pushable(freeze).stop - 1,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                output_bytes=layer.output_bytes,
                flops=w.flops,
                parameter_bytes=layer.parameter_bytes,
                working_bytes=w.working_bytes,
                saved_bytes=w.saved_bytes,
                server_seconds=seconds / speed,
                client_seconds=seconds,
            )
            for layer, w, seconds in zip(model.layers, work, forward, strict=True)
        ),
        samples=SampleProfile(
            stored_bytes=stored,
            encoded=conditions.stored_bytes is not None,
            uint8_bytes=tensor_bytes // 4,
            tensor_bytes=tensor_bytes,
        ),
        server=ServerProfile(
            read_seconds=stored / STORE_BYTES_PER_SECOND,
            model_load_seconds=0.0,
            concurrency=conditions.concurrency,
            waiting_seconds=conditions.waiting_seconds,
            cos_batch=conditions.cos_batch,
        ),
        server_tier=_faster(machine, speed),
        client_tier=machine,
        link=LinkProfile(
            bits_per_second=conditions.bits_per_second,
            variation=conditions.variation,
            request_seconds=REQUEST_SECONDS,
        ),
        step_seconds=step,
        update_seconds=update,
        optimizer_bytes_per_parameter_byte=1.0,
        notes=(timer.note, step_note, *_notes(device)),
    )


def _notes(device: torch.device) -> tuple[str, ...]:
    kind = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    measured = (
        f"measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {device.type} ({kind}), {platform.machine()}, "
        f"torch {torch.__version__}, hapi {__version__}"
    )
    assumed = (
        f"assumed: the store gives {STORE_BYTES_PER_SECOND / 1e6:.0f} MB/s, a request costs "
        f"{REQUEST_SECONDS * 1e3:.0f} ms, the front stays loaded, the server is built like this machine"
    )
    return measured, assumed


class _Timer:
    """Times layers within a budget, and predicts those that do not fit into it."""

    def __init__(self, model: LayeredModel, work: Sequence[LayerWork], device: torch.device) -> None:
        self._model = model.over(copy.deepcopy(model.module))
        self._work, self._device = work, device
        square = torch.ones(512, 512, device=device)
        self._flops = 2 * 512**3 / _timed(lambda: square @ square, device)
        source = torch.ones(_PATTERN_BYTES // 4, device=device)
        target = torch.empty_like(source)
        self._traffic = 2 * _PATTERN_BYTES / _timed(lambda: target.copy_(source), device)
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
        """How much longer than predicted the timed layers of this one's kind took."""
        alike = [i for i in measured if bool(self._work[i - 1].flops) == bool(self._work[layer - 1].flops)]
        chosen = alike or list(measured)
        if not chosen:
            return 1.0
        return sum(measured[i] for i in chosen) / sum(self.predicted(i) for i in chosen)

    def _affordable(self, start: int, stop: int, seconds: float, limit: float, batches: Sequence[int]) -> int:
        """The largest batch whose ``seconds`` a sample, and the filling of weights, stay below ``limit``; or 0."""
        weights = sum(layer.parameter_bytes for layer in self._model.layers[start:stop])
        left = limit - 4 * weights / self._traffic
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

    def step(self, freeze: int, forward: Sequence[float], budget: float) -> tuple[float, float, str]:
        """(seconds a sample of forward and backward pass after ``freeze``, seconds of an update, a note)."""
        stop = len(self._model)
        guess = 3 * sum(forward[freeze:])
        batch = self._affordable(freeze, stop, guess * _RUNS, budget, _TRAINED_BATCHES)
        weights = sum(layer.parameter_bytes for layer in self._model.layers[freeze:])
        if not batch:
            # Read weight, gradient and momentum, write weight and momentum; the copy rate counts both ways.
            update = 5 * weights / self._traffic
            return guess, update, "trained part: three times its forward pass (backward is about two)"
        fill(self._model, freeze, stop, self._device)
        part = self._model.segment(freeze, stop, frozen=False).to(self._device)
        parameters = [p for p in part.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)
        x = self._input(freeze, batch)

        def once() -> None:
            optimizer.zero_grad()
            part(x).square().mean().backward()

        step = _timed(once, self._device) / batch
        update = _timed(optimizer.step, self._device)
        self._model.release(0, 0)
        return step, update, f"trained part: timed with {batch} samples, SGD with momentum"


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work``, after a run to warm up."""
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _machine(input_shape: tuple[int, ...], device: torch.device, encoded: bool) -> TierProfile:
    """Decode, checksum and copy rates of this machine."""
    cpu = torch.device("cpu")
    source = np.ones(_PATTERN_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    checksum = _timed(lambda: xxhash.xxh3_64_intdigest(source.data), cpu) / _PATTERN_BYTES
    copying = _timed(lambda: np.copyto(target, source), cpu) / _PATTERN_BYTES
    there = back = 0.0
    if device.type == "cuda":
        pinned = torch.from_numpy(target).pin_memory()
        on_device = pinned.to(device)
        there = _timed(lambda: on_device.copy_(pinned, non_blocking=True), device) / _PATTERN_BYTES
        back = _timed(lambda: pinned.copy_(on_device, non_blocking=True), device) / _PATTERN_BYTES
    return TierProfile(
        device=device.type,
        decode_seconds=_decode_seconds(input_shape) if encoded else 0.0,
        codec_seconds_per_byte=checksum + copying,
        to_device_seconds_per_byte=there,
        from_device_seconds_per_byte=back,
    )


def _faster(tier: TierProfile, speed: float) -> TierProfile:
    return TierProfile(
        device=tier.device,
        decode_seconds=tier.decode_seconds / speed,
        codec_seconds_per_byte=tier.codec_seconds_per_byte / speed,
        to_device_seconds_per_byte=tier.to_device_seconds_per_byte,
        from_device_seconds_per_byte=tier.from_device_seconds_per_byte,
    )


def _decode_seconds(input_shape: tuple[int, ...]) -> float:
    """Seconds to decode and transform a synthetic JPEG of 500 x 375, ImageNet's usual size, on one thread."""
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(buffer, "JPEG", quality=95)
    data = np.frombuffer(buffer.getvalue(), dtype=np.uint8)
    one = np.zeros(1, dtype=np.int64)
    samples = Samples(ids=one, data=data, offsets=np.array([0, len(data)]), labels=one)
    transform = TransformSpec.for_image_size(input_shape[-1])
    layout = SampleLayout(kind="encoded")
    return _timed(lambda: input_batch(samples, layout, transform), torch.device("cpu"))
