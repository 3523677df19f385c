"""Metrics over the samples of a validation: counts made here, all else by torchmetrics."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hapi.errors import UsageError
from hapi.train.objective.names import TOP, MetricName
from hapi.wire.labels import LabelKind

EXACT_VALUES = 1 << 24
"""Most outputs (samples x classes) that are kept for exact curves: 64 MB. With more, curves have
:data:`THRESHOLDS` points."""
THRESHOLDS = 1000
_BY_COUNTING = ("accuracy", "top5")
_OF_CURVES = ("auroc", "average_precision")


class Scores:
    """Measures metrics over batches of outputs on the CPU.

    Args:
        names: metrics to measure, defined for ``kind``.
        kind: kind of the labels.
        classes: number of classes or outputs.
        samples: samples to come, in all.
    """

    def __init__(self, names: Sequence[MetricName], kind: LabelKind, classes: int, samples: int) -> None:
        self._names, self._kind, self._classes = tuple(names), kind, classes
        self.samples = 0
        """Samples so far."""
        columns = classes if kind != "regression" else 0
        self.class_samples = torch.zeros(columns, dtype=torch.int64)
        """Samples of each class; [classes]."""
        self.class_right = torch.zeros(columns, dtype=torch.int64)
        """Samples of each class that were classified right; of several labels: those right in this one."""
        self._among_five = 0
        thresholds = None if samples * classes <= EXACT_VALUES else THRESHOLDS
        self._measured = {
            name: _metric(name, kind, classes, thresholds) for name in names if name not in _BY_COUNTING
        }

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: outputs float32 [n, k], targets int64 [n] or float32 [n, k]."""
        self.samples += len(outputs)
        if self._kind == "regression":
            found, truth = outputs.double(), targets.double()
            for metric in self._measured.values():
                metric.update(found.squeeze(1), truth.squeeze(1))
            return
        if self._kind == "single":
            right = outputs.argmax(1) == targets
            self.class_samples += torch.bincount(targets, minlength=self._classes)
            self.class_right += torch.bincount(targets[right], minlength=self._classes)
            if "top5" in self._names:
                five = outputs.topk(min(TOP, self._classes)).indices
                self._among_five += int((five == targets[:, None]).sum())
            truth, shares = targets, outputs.softmax(1)
        else:
            truth, shares = (targets >= 0.5).long(), outputs.sigmoid()
            self.class_samples += truth.sum(0)
            self.class_right += ((outputs > 0) == truth.bool()).sum(0)
        for metric in self._measured.values():
            metric.update(shares, truth)

    def result(self) -> dict[str, float]:
        """Return each metric by name; a metric without the samples that it needs is NaN."""
        found: dict[str, float] = {}
        for name in self._names:
            if name == "accuracy":
                cells = self.samples * (1 if self._kind == "single" else self._classes)
                found[name] = int(self.class_right.sum()) / cells
            elif name == "top5":
                found[name] = self._among_five / self.samples
            elif name == "r2" and self.samples < 2:  # torchmetrics raises
                found[name] = float("nan")
            else:
                found[name] = self._mean(name)
        return found

    def class_accuracy(self) -> list[float | None]:
        """Return the accuracy of each class; None without samples (with several labels, of all samples)."""
        whole = (
            self.class_samples if self._kind == "single" else torch.full_like(self.class_right, self.samples)
        )
        return [
            right / count if count else None
            for right, count in zip(self.class_right.tolist(), whole.tolist(), strict=True)
        ]

    def _mean(self, name: MetricName) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes without samples, which are left out below
            value: torch.Tensor = self._measured[name].compute()
        if name not in _OF_CURVES:
            return value.item()
        # A curve needs samples of the class; the one of rates also others.
        present = self.class_samples > 0
        if name == "auroc":
            present &= self.class_samples < self.samples
        return value.reshape(-1)[present].double().mean().item() if present.any() else float("nan")


def _metric(name: MetricName, kind: LabelKind, classes: int, thresholds: int | None) -> Any:
    """The metric of torchmetrics for probabilities [n, classes] or, in a regression, for numbers."""
    try:
        from torchmetrics import classification, regression
    except ImportError as error:
        raise UsageError(f"--metric {name} needs torchmetrics ({error}): pip install torchmetrics") from None
    if kind == "regression":
        makers: dict[str, Any] = {
            "mae": regression.MeanAbsoluteError,
            "rmse": lambda: regression.MeanSquaredError(squared=False),
            "r2": regression.R2Score,
        }
        return makers[name]().set_dtype(torch.float64)
    prefix, size = ("Multiclass", "num_classes") if kind == "single" else ("Multilabel", "num_labels")
    common: dict[str, Any] = {size: classes, "validate_args": False}
    if name in _OF_CURVES:
        end = "AUROC" if name == "auroc" else "AveragePrecision"
        return getattr(classification, prefix + end)(average=None, thresholds=thresholds, **common)
    end = {"f1": "F1Score", "precision": "Precision", "recall": "Recall"}[name]
    return getattr(classification, prefix + end)(average="macro", **common)
