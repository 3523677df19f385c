"""``benchmarks gpu``: how fast the two tiers' frozen layers, copies and wire are on a GPU.

For each of the paper's families: the frozen front through the server's :class:`Device` (inputs in pinned memory,
outputs back in pinned memory, as a request has them) and the client's :class:`FrozenSuffix`, from pinned features to
outputs on the device. Beside them what bounds both: copies between host and device, and the wire over loopback.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.serving.gpu_wire import measure_features
from benchmarks.testbed.conditions import Spread, conditions
from hapi.client.loading.buffers import BufferPool
from hapi.client.memory import FrozenSuffix, MicroBatch
from hapi.clocks import StageClock
from hapi.models.devices import finish, resolve_device
from hapi.models.graph.layers import LayeredModel
from hapi.models.paper_families import PAPER_FREEZE
from hapi.models.zoo.build import ModelSpec, build
from hapi.server.device.device import Device
from hapi.wire.report import STAGES

MODELS = tuple(PAPER_FREEZE)
COPY_BYTES = 256 << 20
ROUNDS = 3
"""Measurements of each figure at least, after one that is not counted."""


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """Measurements to take."""

    models: tuple[str, ...] = MODELS
    image_size: int = 224
    cos_batches: tuple[int, ...] = (16, 128)
    """The server's default, and a batch that fills a large GPU."""
    micro_batch: int = 64
    """The client's default."""
    seconds: float = 60.0
    """About how long to measure in all; building the models comes on top."""
    device: str = "cuda"
    copy_bytes: int = COPY_BYTES


@dataclass(frozen=True, kw_only=True)
class ModelRates:
    """Samples per second of one model."""

    model: str
    freeze: int
    split: int
    """Last layer of the server's part: half of the freeze."""
    prefix: dict[int, Spread]
    """Layers 1..freeze on the server's device, by COS batch."""
    suffix: Spread
    """Layers split+1..freeze on the client, in micro-batches."""
    peak_memory_bytes: int
    """Most that torch held on the GPU while this model was measured; 0 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """All figures of one run, and its conditions."""

    settings: GpuSettings
    models: list[ModelRates]
    copies: dict[str, Spread]
    """GB/s by direction and kind of host memory."""
    wire: dict[str, Spread]
    """GB/s of features over loopback, by where they were."""
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "gpu",
            "image_size": self.settings.image_size,
            "micro_batch": self.settings.micro_batch,
            "models": [
                {
                    "model": m.model,
                    "freeze": m.freeze,
                    "front_samples_per_second": {str(b): s.to_json() for b, s in m.prefix.items()},
                    "rest_split": m.split,
                    "rest_samples_per_second": m.suffix.to_json(),
                    "peak_memory_bytes": m.peak_memory_bytes,
                }
                for m in self.models
            ],
            "copy_gigabytes_per_second": {name: s.to_json() for name, s in self.copies.items()},
            "wire_gigabytes_per_second": {name: s.to_json() for name, s in self.wire.items()},
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person: medians, and the extremes of copies and wire."""
        batches = self.settings.cos_batches
        heads = "".join(f"{f'front {b}':>12}" for b in batches)
        size = self.settings.image_size
        lines = [
            f"samples/s at {size}x{size}: frozen front by COS batch, frozen rest in {self.settings.micro_batch}s",
            f"{'model':<14}{heads}{'rest':>12}  layers of the rest",
        ]
        for m in self.models:
            prefixes = "".join(f"{m.prefix[b].median:12,.0f}" for b in batches)
            lines.append(f"{m.model:<14}{prefixes}{m.suffix.median:12,.0f}  {m.split + 1}..{m.freeze}")
        for title, rates in (("GB/s of copies", self.copies), ("GB/s over loopback", self.wire)):
            lines += ["", f"{title:<34}{'median':>8}{'min':>8}{'max':>8}"]
            lines += [f"{name:<34}{s.median:8.2f}{s.low:8.2f}{s.high:8.2f}" for name, s in rates.items()]
        return lines


def measure_gpu(settings: GpuSettings, say: Callable[[str], None] = lambda line: None) -> GpuResult:
    """Measure everything on ``settings.device``; ``say`` hears what is measured.

    Raises :class:`hapi.errors.UsageError` when there is no such device.
    """
    device = resolve_device(settings.device, "--device")
    found = {**conditions(), **_gpu_conditions(device)}
    share = settings.seconds / (len(settings.models) * (len(settings.cos_batches) + 1) + 6)
    rates = []
    for name in settings.models:
        say(f"{name}: frozen front and rest")
        rates.append(_model_rates(name, settings, device, share))
    say("copies between host and device")
    copies = _copies(settings.copy_bytes, device, share)
    say("features over loopback")
    wire = measure_features(str(device), 2 * share, ROUNDS)
    return GpuResult(settings=settings, models=rates, copies=copies, wire=wire, conditions=found)


def _gpu_conditions(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.total_memory >> 20} MiB",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "float32": "IEEE, no TF32",
    }


def _driver() -> str:
    """The GPU driver's version; torch does not know it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi does not say)"
    return done.stdout.split("\n", 1)[0].strip()


def _timed(work: Callable[[], int], seconds: float, device: torch.device) -> list[float]:
    """Units per second of ``work``, which returns how many it did, for about ``seconds``."""
    work()
    finish(device)
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(rates) < ROUNDS or time.perf_counter() < deadline:
        start = time.perf_counter()
        count = work()
        finish(device)
        rates.append(count / (time.perf_counter() - start))
    return rates


def _model_rates(name: str, settings: GpuSettings, device: torch.device, seconds: float) -> ModelRates:
    size = settings.image_size
    model = build(ModelSpec(architecture=name, input_shape=(3, size, size))).to(device)
    freeze = PAPER_FREEZE[name]
    split = freeze // 2
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    prefix = {b: _prefix_rate(model, freeze, b, device, seconds) for b in settings.cos_batches}
    suffix = _suffix_rate(model, split, freeze, settings.micro_batch, device, seconds)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return ModelRates(
        model=name, freeze=freeze, split=split, prefix=prefix, suffix=suffix, peak_memory_bytes=peak
    )


def _prefix_rate(
    model: LayeredModel, freeze: int, batch: int, device: torch.device, seconds: float
) -> Spread:
    server = Device(device)
    try:
        layers = model.segment(0, freeze, frozen=True)
        inputs = server.pinned(torch.randn(batch, *model.input_shape))
        shape, dtype = model.output_shapes()[freeze], model.output_dtypes()[freeze]
        output = server.host_buffer((batch, *shape), dtype)
        clock = StageClock(STAGES)

        def work() -> int:
            server.begin(layers, inputs, output, key=freeze, clock=clock).result()
            return batch

        return Spread.of(_timed(work, seconds, device))
    finally:
        server.close()


def _suffix_rate(
    model: LayeredModel, split: int, freeze: int, micro_batch: int, device: torch.device, seconds: float
) -> Spread:
    shape, dtype = model.output_shapes()[freeze], model.output_dtypes()[freeze]
    suffix = FrozenSuffix(
        model.segment(split, freeze, frozen=True), shape, dtype, MicroBatch(micro_batch), device
    )
    pool = BufferPool(pinned=device.type == "cuda")
    features = pool.tensor((4 * micro_batch, *model.output_shapes()[split]), model.output_dtypes()[split])
    features.normal_()

    def work() -> int:
        suffix(features)
        return len(features)

    return Spread.of(_timed(work, seconds, device))


def _copies(nbytes: int, device: torch.device, seconds: float) -> dict[str, Spread]:
    """GB/s of copies of ``nbytes`` each way; on a CPU both kinds of host memory are the same and ordinary."""
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    on_gpu = device.type == "cuda"
    rates = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned and on_gpu)
        ways = {f"host to device, {kind}": (on_device, host), f"device to host, {kind}": (host, on_device)}
        for name, (target, source) in ways.items():

            def work(target: torch.Tensor = target, source: torch.Tensor = source) -> int:
                target.copy_(source, non_blocking=True)
                return nbytes

            rates[name] = Spread.of([rate / 1e9 for rate in _timed(work, seconds, device)])
    return rates
