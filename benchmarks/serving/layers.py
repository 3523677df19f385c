"""``benchmarks layers``: output size, forward seconds and memory of every layer (later HAPI text, Figure 2)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.serving.settings import StudySettings
from benchmarks.split import paper
from benchmarks.testbed.conditions import conditions
from hapi.models.devices import resolve_device, set_arithmetic
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze
from hapi.profiler.timing import TimedLayers, layer_segments
from hapi.profiler.work import layer_work
from hapi.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class LayersSettings(StudySettings):
    """Measurements to take; one pass of each is not counted."""

    bs: int = 128
    """Samples of a forward pass (Figure 2b, 2c)."""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer of one model."""

    model: str
    layer: int
    name: str
    frozen: bool
    output_bytes: int
    """Bytes of one sample."""
    input_bytes: int
    """Bytes of one sample as the float32 tensor that enters the model."""
    seconds: float
    """Median seconds of the forward pass of the whole batch."""
    memory_bytes: int
    """Bytes of the whole batch: input, output and values between, as the planner counts them."""


@dataclass(frozen=True, kw_only=True)
class LayersResult:
    """All layers, and the conditions."""

    settings: LayersSettings
    layers: tuple[LayerRow, ...]
    conditions: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer."""
        return [asdict(row) for row in self.layers]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "layers",
            "settings": asdict(self.settings),
            "rows": self.rows(),
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """Return the content of Figure 2, as lines for a person."""
        lines = []
        for model in dict.fromkeys(row.model for row in self.layers):
            lines += [*_model_lines([row for row in self.layers if row.model == model]), ""]
        lines.append(
            f"seconds and memory of a batch of {self.settings.bs}; * smaller than the input; f the freeze. The paper "
            "(Figure 2): few outputs are,"
        )
        lines.append(
            "the first layers take most memory, and time is spread evenly enough to be balanced over two tiers"
        )
        return lines


def measure_layers(settings: LayersSettings, tell: Callable[[str], None]) -> LayersResult:
    """Time every layer of every model, in this process."""
    device = resolve_device(settings.device, "--device")
    set_arithmetic(device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows: list[LayerRow] = []
    for model in settings.models:
        spec = ModelSpec(
            architecture=model, weights="random:0", input_shape=(3, settings.image_size, settings.image_size)
        )
        rows += _layers(model, build(spec), settings, device)
        tell(f"{model}: {rows[-1].layer} layers")
    found = {**conditions(), "device": str(device), "threads": torch.get_num_threads()}
    return LayersResult(settings=settings, layers=tuple(rows), conditions=found)


@torch.no_grad()
def _layers(
    title: str, model: LayeredModel, settings: LayersSettings, device: torch.device
) -> list[LayerRow]:
    freeze = choose_freeze(model, None)
    work = layer_work(model, model.last_split(freeze))
    model.to(device)
    segments = layer_segments(model, 0, len(model.layers))
    x = torch.randn(settings.bs, *model.input_shape, generator=torch.Generator().manual_seed(0)).to(device)
    runs: list[list[float]] = []
    for _ in range(settings.repeats + 1):
        timed = TimedLayers(segments, device)
        timed(x)
        runs.append(timed.seconds)
    return [
        LayerRow(
            model=title,
            layer=i + 1,
            name=layer.name,
            frozen=i < freeze,
            output_bytes=layer.output_bytes,
            input_bytes=model.output_bytes()[0],
            seconds=statistics.median(run[i] for run in runs[1:]),
            memory_bytes=settings.bs * work[i].working_bytes,
        )
        for i, layer in enumerate(model.layers)
    ]


def _model_lines(rows: Sequence[LayerRow]) -> list[str]:
    total, largest = sum(row.seconds for row in rows), max(rows, key=lambda row: row.memory_bytes)
    small = [row.layer for row in rows if row.output_bytes < row.input_bytes and row.frozen]
    first = rows[0]
    size = format_bytes(first.input_bytes)
    lines = [f"{first.model}: input {size}, forward {total:.2f} s, most memory at layer {largest.layer}"]
    named = paper.SMALL_LAYERS.get(first.model)
    theirs = f" (the paper names {', '.join(map(str, named))})" if named else ""
    lines.append(f"  frozen outputs smaller than the input at {_ranges(small)}{theirs}")
    lines.append(f"  {'layer':<28}{'output':>12}{'seconds':>10}{'share':>7}{'memory':>12}")
    last_frozen = max((row.layer for row in rows if row.frozen), default=0)
    for row in rows:
        mark = ("*" if row.output_bytes < row.input_bytes else "") + ("f" if row.layer == last_frozen else "")
        name = f"{row.layer} {row.name[-22:]}"
        lines.append(
            f"  {name:<28}{format_bytes(row.output_bytes):>12}{row.seconds:>10.4f}{row.seconds / total:>7.1%}"
            f"{format_bytes(row.memory_bytes):>12} {mark}"
        )
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """``3-5, 9`` for 3, 4, 5, 9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "none"
