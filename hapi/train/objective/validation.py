"""Validation: loss, metrics and details over held-out samples, the same for a training and ``hapi evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hapi.train.objective.findings import Findings
from hapi.train.objective.losses import Loss
from hapi.train.objective.names import MetricName
from hapi.train.objective.scores import Scores
from hapi.wire.labels import LabelKind

if TYPE_CHECKING:
    from hapi.client.session import Session
    from hapi.train.objective.criterion import Criterion
    from hapi.train.steps.precision import Precision

DETAILS = "validation_details"
"""Field of the last epoch's entry with what is told of the last validation alone."""
MOST_LISTED = 100
"""Most classes that are listed one by one."""


class Validation:
    """Measures a network's outputs for samples with labels, batch by batch.

    Args:
        kind: kind of the labels.
        classes: names of the classes or outputs.
        loss: its value is the mean of the samples, with neither smoothing nor weights.
        metrics: their names.
        samples: samples to come.
    """

    def __init__(
        self, kind: LabelKind, classes: Sequence[str], loss: Loss, metrics: Sequence[MetricName], samples: int
    ) -> None:
        self._loss, self._loss_sum = loss, 0.0
        self._classes = tuple(classes)
        self.scores = Scores(metrics, kind, len(classes), samples)
        """Metrics so far."""
        self.findings = Findings(kind, classes)
        """Confusion matrix and worst samples so far."""

    def update(self, ids: Sequence[int], outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch.

        Args:
            ids: the n samples.
            outputs: float [n, k], on any device.
            targets: int64 [n] or float32 [n, k], there too.
        """
        self._loss_sum += self._loss.total(outputs, targets).item()
        losses = self._loss.each(outputs, targets).cpu()
        scored, truth = outputs.float().cpu(), targets.cpu()
        self.scores.update(scored, truth)
        self.findings.update(ids, scored, truth, losses)

    @property
    def loss(self) -> float:
        """Mean loss of the samples so far."""
        return self._loss_sum / self.scores.samples

    def details(self) -> dict[str, Any]:
        """Return what is told of the last validation only, JSON-able: accuracy by class, confusion, worst samples."""
        confusion, few = self.findings.confusion, len(self._classes) <= MOST_LISTED
        classes = zip(
            self._classes, self.scores.class_samples.tolist(), self.scores.class_accuracy(), strict=False
        )
        return {
            "classes": [{"name": n, "samples": s, "accuracy": a} for n, s, a in classes] if few else [],
            "confusion": confusion,
            "worst": self.findings.worst,
        }


def validate(
    session: Session, module: nn.Module, criterion: Criterion, precision: Precision
) -> dict[str, Any]:
    """Return the figures over the session's validation samples by their names in the report; none without samples.

    Args:
        session: delivers the samples' features.
        module: the layers after the freeze; in eval mode while this runs, in train mode afterwards.
        criterion: loss and metrics.
        precision: arithmetic of the layers.
    """
    ids = session.job_context.validation_ids
    if not len(ids):
        return {}
    found = Validation(criterion.kind, criterion.classes, criterion.loss, criterion.metrics, len(ids))
    ranks = session.ranks
    ranks.equalise(module)
    module.eval()
    with torch.no_grad():
        for batch, (features, labels) in zip(session.validation_batches(), session.validation(), strict=True):
            outputs = precision.outputs(module, features)
            found.update(batch.tolist(), ranks.rows(outputs, len(batch)), ranks.rows(labels, len(batch)))
    module.train()
    return {
        "validation_loss": found.loss,
        **{f"validation_{name}": value for name, value in found.scores.result().items()},
        "validation_seconds": round(session.last.seconds, 4),
        DETAILS: found.details(),
    }
