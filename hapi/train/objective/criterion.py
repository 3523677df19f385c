"""The criterion of one training: its loss, its targets, and what is measured, made from the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hapi.client.dataset_choice import training_counts
from hapi.errors import UsageError
from hapi.train.objective.class_weights import balanced, in_order, read_class_weights
from hapi.train.objective.losses import Loss
from hapi.train.objective.mixing import Targets, mix
from hapi.train.objective.names import MetricName, loss_of, metrics_of
from hapi.train.settings import ObjectiveSettings
from hapi.wire.labels import LabelKind

if TYPE_CHECKING:
    from hapi.client.session import Session


@dataclass(frozen=True, kw_only=True, eq=False)
class Criterion:
    """Loss, targets and metrics of a training; made by :func:`make_criterion`."""

    kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes, or of the outputs of a regression."""
    loss: Loss
    mixup: float | None
    """Alpha of :func:`hapi.train.objective.mixing.mix`; None for none."""
    metrics: tuple[MetricName, ...]
    """Metrics of the validation samples."""
    seed: int

    def batch_of(
        self, features: torch.Tensor, labels: torch.Tensor, epoch: int, batch: int
    ) -> tuple[torch.Tensor, Targets]:
        """Return features and targets of a training batch, mixed where the settings say so.

        Args:
            features: [n, ...].
            labels: int64 [n] or float32 [n, k].
            epoch: number from 0.
            batch: number in the epoch.
        """
        if self.mixup is None:
            return features, Targets(labels)
        return mix(features, labels, self.mixup, self.seed, epoch, batch)

    def value(self, outputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the loss that training minimises, a scalar."""
        own = self.loss(outputs, targets.own)
        if targets.other is None:
            return own
        return own * targets.share + self.loss(outputs, targets.other) * (1 - targets.share)

    def right(self, outputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return how many predictions are right, an int64 scalar: by the larger part of mixed targets; of a
        regression 0.
        """
        truth = targets.larger
        if self.kind == "single":
            return (outputs.detach().argmax(1) == truth).sum()
        if self.kind == "multi":
            return ((outputs.detach() > 0) == (truth >= 0.5)).sum()
        return torch.zeros((), dtype=torch.int64, device=outputs.device)

    def accuracy(self, right: int, samples: int) -> float | None:
        """Return the share of predictions that are right; None in a regression.

        Args:
            right: sum of :meth:`right`.
            samples: samples that it was counted over.
        """
        if self.kind == "regression":
            return None
        return right / (samples * (1 if self.kind == "single" else len(self.classes)))

    def identity(self) -> dict[str, Any]:
        """Facts that must be equal for a resumed run to be the same training, beside its settings' own values."""
        weights = self.loss.weights
        return {
            "loss": self.loss.name,
            "class weights": None if weights is None else _digest(weights),
        }


def make_criterion(settings: ObjectiveSettings, session: Session) -> Criterion:
    """Return the criterion that the settings name, for the session's labels.

    Raises:
        UsageError: loss, smoothing, weights or metrics do not fit the labels.
    """
    job = session.job_context
    counts = None
    if settings.class_weights == "balanced":
        held_out = job.description.count - len(job.training_ids)
        counts = training_counts(session.settings, job.servers, job.description, held_out)
    return criterion_of(
        settings,
        session.label_kind,
        job.description.classes,
        counts=counts,
        samples=len(job.training_ids),
        seed=session.settings.seed,
        device=session.device,
    )


def criterion_of(
    settings: ObjectiveSettings,
    kind: LabelKind,
    classes: Sequence[str],
    *,
    counts: Sequence[int] | None,
    samples: int,
    seed: int,
    device: torch.device,
) -> Criterion:
    """Return the criterion that the settings name for labels of this kind.

    Args:
        settings: loss, weights, mixup and metrics.
        kind: kind of the labels.
        classes: names of the classes or outputs.
        counts: training samples of each class, for balanced weights; None when the server does not tell.
        samples: training samples in all.
        seed: of the mixup.
        device: of the outputs.

    Raises:
        UsageError: loss, smoothing, weights or metrics do not fit the labels.
    """
    name = loss_of(settings.loss, kind)
    if kind == "regression" and settings.label_smoothing:
        raise UsageError("--label-smoothing: needs classes; the dataset has numbers as labels")
    weights = _weights(settings.class_weights, kind, classes, counts, samples)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=device)
    return Criterion(
        kind=kind,
        classes=tuple(classes),
        loss=Loss(name=name, smoothing=settings.label_smoothing, weights=tensor, delta=settings.huber_delta),
        mixup=settings.feature_mixup,
        metrics=metrics_of(settings.metric, settings.best, kind, len(classes)),
        seed=seed,
    )


def _weights(
    chosen: str, kind: LabelKind, classes: Sequence[str], counts: Sequence[int] | None, samples: int
) -> tuple[float, ...] | None:
    if chosen == "none":
        return None
    if kind == "regression":
        raise UsageError("--class-weights: needs classes; the dataset has numbers as labels")
    if chosen != "balanced":
        return in_order(read_class_weights(chosen), classes, chosen)
    if counts is None:
        raise UsageError(
            "--class-weights balanced: the server does not tell how many training samples each class has; update it, "
            "or give a file of weights"
        )
    return balanced(counts, samples, kind)


def _digest(weights: torch.Tensor) -> str:
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16]
