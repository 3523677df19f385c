"""Losses and metrics by name, for settings; brings no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hapi.errors import UsageError
from hapi.wire.labels import LabelKind

LossName = Literal["auto", "cross-entropy", "bce", "mse", "l1", "huber"]
MetricName = Literal[
    "accuracy", "top5", "f1", "precision", "recall", "auroc", "average_precision", "mae", "rmse", "r2"
]
BestName = Literal[
    "auto",
    "loss",
    "accuracy",
    "top5",
    "f1",
    "precision",
    "recall",
    "auroc",
    "average_precision",
    "mae",
    "rmse",
    "r2",
]
LOSSES: Mapping[LabelKind, tuple[LossName, ...]] = {
    "single": ("cross-entropy",),
    "multi": ("bce",),
    "regression": ("mse", "l1", "huber"),
}
"""Losses for each kind of labels, the default first."""
KIND_WORDS: Mapping[LabelKind, str] = {
    "single": "one class for each sample",
    "multi": "several classes for each sample",
    "regression": "numbers as labels",
}


@dataclass(frozen=True)
class Metric:
    """Facts of a metric."""

    kinds: tuple[LabelKind, ...]
    """Kinds of labels that it is defined for."""
    higher: bool = True
    """True when a higher value is better."""


METRICS: Mapping[MetricName, Metric] = {
    "accuracy": Metric(("single", "multi")),
    "top5": Metric(("single",)),
    "f1": Metric(("single", "multi")),
    "precision": Metric(("single", "multi")),
    "recall": Metric(("single", "multi")),
    "auroc": Metric(("single", "multi")),
    "average_precision": Metric(("single", "multi")),
    "mae": Metric(("regression",), higher=False),
    "rmse": Metric(("regression",), higher=False),
    "r2": Metric(("regression",)),
}
TOP = 5
"""Classes that ``top5`` accepts."""


def loss_of(name: LossName, kind: LabelKind) -> LossName:
    """Return the loss for labels of this kind; ``auto`` is the default one.

    Raises:
        UsageError: the loss needs labels of another kind.
    """
    if name == "auto":
        return LOSSES[kind][0]
    if name not in LOSSES[kind]:
        raise UsageError(
            f"--loss {name}: the dataset has {KIND_WORDS[kind]}; give {' or '.join(LOSSES[kind])}, or leave it out"
        )
    return name


def metrics_of(
    chosen: Sequence[MetricName], best: BestName, kind: LabelKind, classes: int
) -> tuple[MetricName, ...]:
    """Return the metrics to measure, in the order of :data:`METRICS`: the chosen or the default ones, and ``best``.

    Args:
        chosen: names that the user gave; none for the default.
        best: the metric that the best epoch is chosen by.
        kind: kind of the labels.
        classes: number of classes or outputs.

    Raises:
        UsageError: a metric is not defined for labels of this kind.
    """
    wanted = {*(chosen or _default(kind, classes)), *(name for name in METRICS if name == best)}
    for flag, names in (("--metric", chosen), ("--best", [name for name in METRICS if name == best])):
        for name in names:
            if kind not in METRICS[name].kinds:
                known = ", ".join(n for n, metric in METRICS.items() if kind in metric.kinds)
                raise UsageError(f"{flag} {name}: the dataset has {KIND_WORDS[kind]}; give one of {known}")
    if kind != "regression":
        wanted.add("accuracy")
    return tuple(name for name in METRICS if name in wanted)


def _default(kind: LabelKind, classes: int) -> tuple[MetricName, ...]:
    if kind == "single":
        return ("accuracy", "top5") if classes > TOP else ("accuracy",)
    return ("accuracy", "f1", "auroc") if kind == "multi" else ("mae", "rmse")


def metrics_text(figures: Mapping[str, Any], prefix: str = "") -> str:
    """Return loss and metrics for people: ``loss 0.3121, accuracy 91.20%, f1 0.8740``; empty when there are none.

    Args:
        figures: values by name; other names are left out.
        prefix: what the names begin with.
    """
    found = ((name, figures.get(prefix + name)) for name in ("loss", *METRICS))
    return ", ".join(
        f"{name} {100 * value:.2f}%" if name in ("accuracy", "top5") else f"{name} {value:.4f}"
        for name, value in found
        if value is not None
    )
