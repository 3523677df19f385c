"""A fine-tuned network at work: predictions for images and datasets, and how good they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hapi.api.model_files import ImageTransform, LoadedModel
from hapi.arrays import IntArray
from hapi.data.mount import DatasetReader
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.errors import DataError, DeviceMemoryError, UsageError
from hapi.ingest.sources.folder import EXTENSIONS
from hapi.process.memory_errors import is_out_of_memory
from hapi.process.processors import processor_count

__all__ = ("Evaluation", "Outputs", "evaluate", "image_files", "predict_dataset", "predict_images")


class Outputs(NamedTuple):
    """A batch's outputs."""

    names: list[str]
    """Names of the images, or ids of the samples."""
    labels: IntArray
    """Int64 [B]; of images without labels -1."""
    logits: torch.Tensor
    """Float32 [B, outputs], on the CPU."""


def image_files(folder: Path) -> list[Path]:
    """All images in ``folder`` and below, in the order of their names; hidden folders are left out.

    Raises:
        UsageError: there are none, or the folder cannot be read.
    """
    found: list[Path] = []

    def failed(error: OSError) -> None:
        raise UsageError(f"{error.filename}: {error.strerror}")

    for place, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in sorted(files) if name.lower().endswith(EXTENSIONS)]
    if not found:
        raise UsageError(f"{folder} has no images in it ({', '.join(EXTENSIONS)})")
    return found


def predict_images(model: LoadedModel, files: Sequence[Path], batch_size: int = 32) -> Iterator[Outputs]:
    """The outputs for image ``files``, ``batch_size`` at a time, on the device that the model is on.

    Raises:
        DataError: a file cannot be read or decoded; the message names it.
        UsageError: the network takes no images.
    """
    if model.transform is None:
        raise UsageError(
            "this model was trained on arrays and takes no images; give a dataset, as STORE/NAME"
        )
    for start in range(0, len(files), batch_size):
        chosen = files[start : start + batch_size]
        yield Outputs(
            [str(file) for file in chosen],
            np.full(len(chosen), -1, dtype=np.int64),
            _run(model.module, torch.stack([_input(model.transform, f) for f in chosen])),
        )


def _input(transform: ImageTransform, file: Path) -> torch.Tensor:
    try:
        return transform(file)
    except DataError as error:
        raise DataError(f"image {file}: {error}") from None


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
        yield Outputs([str(i) for i in batch.ids], batch.labels.astype(np.int64), _run(model.module, inputs))


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
    """Mean cross-entropy."""
    accuracy: float
    """Share of samples whose label has the largest output."""
    top5: float
    """Share of samples whose label is among the five largest outputs (or among all, if there are fewer)."""
    class_samples: tuple[int, ...]
    """Samples of each class."""
    class_accuracy: tuple[float | None, ...]
    """Accuracy of each class; None without samples."""


def evaluate(
    model: LoadedModel,
    dataset: DatasetReader,
    batch_size: int = 32,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> Evaluation:
    """Compare the network's outputs for all samples of ``dataset`` with their labels.

    Args:
        model: the network, on the device that it is to run on.
        dataset: read from its first sample to its last.
        batch_size: samples that go through the network at once.
        on_progress: told how many samples more are done, after each batch.

    Raises:
        DataError: a sample is damaged or cannot be decoded, or the dataset has no samples.
        UsageError: the dataset's classes or samples are others than the network's.
    """
    _check_classes(model.classes, dataset.dataset.classes)
    if not dataset.count:
        raise DataError("the dataset has no samples")
    classes = len(model.classes)
    total, right = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    loss, among = 0.0, 0
    for names, labels, logits in predict_dataset(model, dataset, batch_size):
        target = torch.from_numpy(labels)
        loss += nn.functional.cross_entropy(logits, target, reduction="sum").item()
        best = logits.topk(min(5, classes)).indices == target[:, None]
        among += int(best.sum())
        total += np.bincount(labels, minlength=classes)
        right += np.bincount(labels[best[:, 0].numpy()], minlength=classes)
        on_progress(len(names))
    return Evaluation(
        samples=dataset.count,
        loss=loss / dataset.count,
        accuracy=int(right.sum()) / dataset.count,
        top5=among / dataset.count,
        class_samples=tuple(total.tolist()),
        class_accuracy=tuple(
            r / t if t else None for r, t in zip(right.tolist(), total.tolist(), strict=True)
        ),
    )


def _check_classes(own: Sequence[str], others: Sequence[str]) -> None:
    if list(others) != list(own[: len(others)]):
        raise UsageError(
            "the dataset's classes are others than the model's, or in another order: "
            f"{', '.join(others[:5])} and {', '.join(own[:5])}; pack the data with the model's classes (--classes)"
        )
