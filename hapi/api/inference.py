"""A fine-tuned network at work: predictions for images and datasets, and how good they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hapi.api.model_files import LoadedModel
from hapi.arrays import LabelArray
from hapi.data.mount import DatasetReader
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.errors import DataError, DeviceMemoryError, UsageError
from hapi.ingest.sources.folder import EXTENSIONS
from hapi.process.memory_errors import is_out_of_memory
from hapi.process.processors import processor_count
from hapi.text import class_name
from hapi.train.objective.losses import Loss
from hapi.train.objective.names import KIND_WORDS, LOSSES, MetricName, metrics_of
from hapi.train.objective.validation import Validation
from hapi.wire.labels import LabelKind

__all__ = (
    "Evaluation",
    "Labelled",
    "Outputs",
    "evaluate",
    "image_files",
    "predict_dataset",
    "predict_images",
    "score",
)


class Outputs(NamedTuple):
    """A batch's outputs."""

    names: list[str]
    """Names of the images, or ids of the samples."""
    labels: LabelArray
    """Int64 [B], or float32 [B, outputs]; of images without labels -1."""
    logits: torch.Tensor
    """Float32 [B, outputs], on the CPU."""


def image_files(folder: Path) -> list[Path]:
    """All images in ``folder`` and below, in the order of their names; hidden files and folders are left out.

    Raises:
        UsageError: there are none, or the folder cannot be read.
    """
    found: list[Path] = []

    def failed(error: OSError) -> None:
        raise UsageError(f"{error.filename}: {error.strerror}")

    for place, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = sorted(name for name in files if not name.startswith("."))
        found += [Path(place, name) for name in shown if name.lower().endswith(EXTENSIONS)]
    if not found:
        raise UsageError(f"{folder} has no images in it ({', '.join(EXTENSIONS)})")
    return found


def predict_images(
    model: LoadedModel,
    files: Sequence[Path],
    batch_size: int = 32,
    on_bad: Callable[[str], None] | None = None,
) -> Iterator[Outputs]:
    """The outputs for image ``files``, ``batch_size`` at a time, on the device that the model is on.

    Args:
        model: the network.
        files: paths of the images.
        batch_size: images that go through the network at once.
        on_bad: takes a line about each file that cannot be read or decoded, which is then left out; None: the first
            one is an error.

    Raises:
        DataError: a file cannot be read or decoded, without ``on_bad``; the message names it.
        UsageError: the network takes no images.
    """
    if model.transform is None:
        raise UsageError(
            "this model was trained on arrays and takes no images; give a dataset, as STORE/NAME"
        )
    for start in range(0, len(files), batch_size):
        names, inputs = [], []
        for file in files[start : start + batch_size]:
            try:
                inputs.append(model.transform(file))
                names.append(str(file))
            except DataError as error:
                if on_bad is None:
                    raise
                on_bad(str(error))
        if names:
            labels = np.full(len(names), -1, dtype=np.int64)
            yield Outputs(names, labels, _run(model.module, torch.stack(inputs)))


def predict_dataset(model: LoadedModel, dataset: DatasetReader, batch_size: int = 32) -> Iterator[Outputs]:
    """The outputs for all samples of ``dataset`` in the order of their ids, ``batch_size`` at a time.

    Raises:
        DataError: a sample is damaged or cannot be decoded.
        UsageError: the samples have another form than the network takes.
    """
    layout, transform = dataset.dataset.layout, model.card.transform
    expected, found = model.card.spec.input_shape, input_shape(layout, transform)
    if found != expected:
        raise UsageError(f"the dataset gives inputs of {list(found)}, the model takes {list(expected)}")
    dataset.sequence(seed=0, epoch=0, order=np.arange(dataset.count, dtype=np.int64))
    while len((batch := dataset.next_batch(batch_size)).ids):
        inputs = input_batch(batch, layout, transform, threads=processor_count())
        yield Outputs([str(i) for i in batch.ids], batch.labels.copy(), _run(model.module, inputs))


def _run(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    device = next((p.device for p in module.parameters()), inputs.device)
    try:
        with torch.inference_mode():
            outputs: torch.Tensor = module(inputs.to(device))
            return outputs.float().to("cpu")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the network with a batch of {len(inputs)} does not fit {device}; choose a smaller --batch-size"
        ) from None


@dataclass(frozen=True)
class Evaluation:
    """How good a network is on labelled samples."""

    samples: int
    loss: float
    """Mean loss, with neither smoothing nor weights: cross-entropy; with several labels for a sample binary
    cross-entropy; of numbers the squared error."""
    metrics: Mapping[str, float]
    """Metrics by name."""
    class_samples: tuple[int, ...]
    """Samples of each class; empty for numbers."""
    class_accuracy: tuple[float | None, ...]
    """Accuracy of each class; None without samples."""
    confusion: tuple[tuple[int, ...], ...] | None
    """Samples by class (row) and prediction (column), for one class per sample and up to 100 classes."""
    worst: tuple[Mapping[str, Any], ...]
    """Up to 20 samples with the highest loss: id, label, predicted, probability, loss, and the sample's object where
    each has its own."""


def evaluate(
    model: LoadedModel,
    dataset: DatasetReader,
    batch_size: int = 32,
    on_progress: Callable[[int], None] = lambda samples: None,
    metrics: Sequence[MetricName] = (),
) -> Evaluation:
    """Compare the network's outputs for all samples of ``dataset`` with their labels.

    Args:
        model: the network, on the device that it is to run on.
        dataset: read from its first sample to its last.
        batch_size: samples that go through the network at once.
        on_progress: told how many samples more are done, after each batch.
        metrics: their names, as for ``--metric``; none for those that suit the labels.

    Raises:
        DataError: a sample is damaged or cannot be decoded, or the dataset has no samples.
        UsageError: the dataset's classes, labels or samples are others than the network's.
    """
    facts = Labelled(dataset.count, dataset.dataset.classes, dataset.dataset.label_form.kind)
    found = score(model, facts, predict_dataset(model, dataset, batch_size), on_progress, metrics)
    return replace(found, worst=tuple(_named(sample, dataset) for sample in found.worst))


@dataclass(frozen=True)
class Labelled:
    """Facts of a dataset that outputs are compared with."""

    count: int
    """Number of samples."""
    classes: Sequence[str]
    kind: LabelKind


def score(
    model: LoadedModel,
    dataset: Labelled,
    outputs: Iterable[Outputs],
    on_progress: Callable[[int], None] = lambda samples: None,
    metrics: Sequence[MetricName] = (),
) -> Evaluation:
    """Compare ``outputs``, of all samples in the order of their ids, with the samples' labels.

    Args:
        model: the network.
        dataset: facts of the samples; they are checked before the first output is asked for.
        outputs: made while they are asked for.
        on_progress: told how many samples more are done, after each batch.
        metrics: their names, as for ``--metric``; none for those that suit the labels.

    Raises:
        DataError: the dataset has no samples.
        UsageError: the dataset's classes or labels are others than the network's.
    """
    kind, classes, found_kind = model.card.label_kind, model.classes, dataset.kind
    if found_kind != kind:
        raise UsageError(
            f"the dataset has {KIND_WORDS[found_kind]}, the model was trained for {KIND_WORDS[kind]}"
        )
    _check_classes(classes, dataset.classes, whole=kind != "single")
    if not dataset.count:
        raise DataError("the dataset has no samples")
    names = metrics_of(metrics, "auto", kind, len(classes))
    found = Validation(kind, classes, Loss(name=LOSSES[kind][0]), names, dataset.count)
    for ids, labels, logits in outputs:
        found.update([int(i) for i in ids], logits, torch.from_numpy(labels))
        on_progress(len(ids))
    confusion = found.findings.confusion
    return Evaluation(
        samples=dataset.count,
        loss=found.loss,
        metrics=found.scores.result(),
        class_samples=tuple(found.scores.class_samples.tolist()),
        class_accuracy=tuple(found.scores.class_accuracy()),
        confusion=None if confusion is None else tuple(map(tuple, confusion)),
        worst=tuple(found.findings.worst),
    )


def _named(sample: Mapping[str, Any], dataset: DatasetReader) -> Mapping[str, Any]:
    """``sample`` with the key of its object, where an object is one sample."""
    shards = dataset.dataset.shards
    if len(shards) != dataset.count:
        return sample
    located = dataset.dataset.locate([sample["id"]])
    return {"id": sample["id"], "object": dataset.dataset.shard_key(int(located.shard[0])), **sample}


def same_classes(own: Sequence[str], others: Sequence[str], *, whole: bool) -> bool:
    """Return whether a dataset's classes are those of a model, whose names came over the wire.

    Args:
        own: those of the model.
        others: those of the dataset.
        whole: False where the dataset may lack the model's last ones.
    """
    known = own if whole else own[: len(others)]
    return list(map(class_name, others)) == list(map(class_name, known))


def _check_classes(own: Sequence[str], others: Sequence[str], *, whole: bool) -> None:
    if not same_classes(own, others, whole=whole):
        raise UsageError(
            "the dataset's classes are others than the model's, or in another order: "
            f"{', '.join(others[:5])} and {', '.join(own[:5])}; pack the data with the model's classes (--classes)"
        )
