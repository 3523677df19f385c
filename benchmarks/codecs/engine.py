"""``benchmarks codecs``: ratio and speed of every exact codec on features of every cut, and where each pays.

The seven families are trained shortly on photographs first (:mod:`benchmarks.codecs.training`); the real job's
EfficientNet-Lite0 has its own weights. With ``--accuracy`` the codecs that round are judged, too: by the held-out
accuracy of the real job's heads (:mod:`benchmarks.codecs.accuracy`).

Each cut is a record, so an interrupted run goes on where it was; trained weights and features are kept in a folder
beside the file of records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.codecs.accuracy import measure_accuracy, solar_dataset, solar_inputs
from benchmarks.codecs.rows import (
    CutRow,
    accuracy_table,
    cut_lines,
    cut_rows,
    sources,
    summary_table,
    verdict,
)  # fmt: skip
from benchmarks.codecs.settings import DTYPES, PART_BYTES, SAMPLES, CodecsSettings
from benchmarks.codecs.training import BATCH, CLASSES, family, held_out_crops, train
from benchmarks.epochs.jobs import SOLAR_SIDE, solar_spec
from benchmarks.epochs.settings import REAL_JOB
from benchmarks.testbed.cells import Results
from benchmarks.testbed.conditions import recorded_conditions
from hapi.allocator import keep_freed_memory
from hapi.codecs.choose import CodecFigures
from hapi.codecs.exact import Buffer
from hapi.codecs.measure import measure
from hapi.data.mount import open_dataset
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.freeze import choose_freeze
from hapi.repository.sources.networks import build_network

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CodecsResult:
    """All records of a file, those of earlier runs too."""

    records: Sequence[dict[str, Any]]

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions of the runs."""
        return recorded_conditions(self.records)

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        accuracies = [r for r in self.records if r["kind"] == "accuracy"]
        return {
            "benchmark": "codecs",
            "sources": sources(self.records),
            "rows": [row.to_json() for row in cut_rows(self.records)],
            "accuracies": accuracies,
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        rows = cut_rows(self.records)
        return [
            *cut_lines(rows), "", *summary_table(rows), "", *verdict(rows), "",
            *(f"{model}: {text}" for model, text in sources(self.records).items()), "",
            *accuracy_table(self.records),
            "GB/s: raw bytes for each second of one processor, the fastest of the repeats.",
            "A codec pays below the link rate in Gbit/s.",
        ]  # fmt: skip


def measure_codecs(settings: CodecsSettings, results: Results, tell: Tell) -> CodecsResult:
    """Measure what ``results`` does not hold, in this process and one thread.

    Args:
        settings: models and sizes.
        results: file of records; each cut is added as it is measured.
        tell: gets a line after each model, and as networks train.

    Raises:
        UsageError: the pre-trained network, its images or scikit-learn are not installed.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    folder = results.path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name in settings.models:
        _measure_model(name, settings, results, folder, tell)
    if settings.accuracy:
        measure_accuracy(settings, results, folder, tell)
    return CodecsResult(records=results.records)


def _measure_model(name: str, settings: CodecsSettings, results: Results, folder: Path, tell: Tell) -> None:
    if any(r["kind"] == "model" and r["model"] == name for r in results.records):
        tell(f"{name}: is measured")
        return
    began = time.monotonic()
    model, inputs, text = (
        _solar(folder) if name == REAL_JOB else _family(name, settings, results, folder, tell)
    )
    results.add({"kind": "source", "model": name, "text": text})
    done = {(r["cut"], r["dtype"]) for r in results.records if r["kind"] == "cut" and r["model"] == name}
    for row in measured_cuts(name, model, inputs, settings.repeats, done):
        results.add({"kind": "cut", **asdict(row)})
    results.add({"kind": "model", "model": name})
    cuts = len({row.cut for row in cut_rows(results.records) if row.model == name})
    tell(f"{name}: {cuts} cuts, {time.monotonic() - began:.0f} s; {text}")


def _family(
    name: str, settings: CodecsSettings, results: Results, folder: Path, tell: Tell
) -> tuple[LayeredModel, torch.Tensor, str]:
    side, weights = settings.image_size, folder / f"{name}.pt"
    trained = [r for r in results.records if r["kind"] == "training" and r["model"] == name]
    if not trained or not weights.exists():
        record = {
            "kind": "training",
            "model": name,
            **asdict(train(name, side, settings.steps, weights, tell)),
        }
        results.add(record)
        trained.append(record)
    last = trained[-1]
    text = (
        f"{SAMPLES} held-out crops of photographs, {side} px; all layers trained from random weights for "
        f"{last['steps']} steps of {BATCH} crops, {last['accuracy']:.1%} of {CLASSES} classes told right"
    )
    return family(name, side, str(weights)), held_out_crops(side, SAMPLES)[0], text


def _solar(folder: Path) -> tuple[LayeredModel, torch.Tensor, str]:
    model = build_network(solar_spec(0), allow_import=True)
    with open_dataset(solar_dataset(folder, "test")) as reader:
        inputs = torch.cat(list(solar_inputs(reader, SAMPLES)))
    return (
        model,
        inputs,
        f"{len(inputs)} held-out photographs of solar cells, {SOLAR_SIDE} px; weights of ImageNet",
    )


@torch.inference_mode()
def measured_cuts(
    title: str, model: LayeredModel, inputs: torch.Tensor, repeats: int, done: set[tuple[int, str]]
) -> Iterator[CutRow]:
    """Yield the rows of every cut that the server may compute, in each type, without those ``done``.

    Args:
        title: of the model in the rows.
        model: the network.
        inputs: of its first layer, [N, C, H, W].
        repeats: times that each is encoded and decoded.
        done: cuts and types.
    """
    features = inputs
    for cut in range(1, model.last_split(choose_freeze(model, None)) + 1):
        features = model.segment(cut - 1, cut, frozen=True)(features)
        for dtype in (getattr(torch, name) for name in DTYPES):
            name = str(dtype).removeprefix("torch.")
            if (cut, name) in done:
                continue
            raw = tensor_bytes(features.to(dtype).contiguous())[:PART_BYTES]
            yield CutRow(
                model=title,
                cut=cut,
                name=model.layers[cut - 1].name,
                dtype=name,
                zeros=float((features == 0).double().mean()),
                nbytes=len(raw),
                figures=fastest(raw, dtype.itemsize, repeats),
            )


def fastest(raw: Buffer, itemsize: int, repeats: int) -> tuple[CodecFigures, ...]:
    """Return the figures of every exact codec on ``raw``: of ``repeats`` measurements the largest rates.

    Seconds are those of this thread on a processor, so that others who use it count as little as may be.
    """
    rounds = [measure([raw], itemsize, clock=time.thread_time) for _ in range(repeats)]
    return tuple(
        CodecFigures(
            name=found[0].name,
            ratio=found[0].ratio,
            encode_rate=max(f.encode_rate for f in found),
            decode_rate=max(f.decode_rate for f in found),
        )
        for found in zip(*rounds, strict=True)
    )
