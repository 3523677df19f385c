"""Details of a validation: the confusion matrix, and the samples with the highest loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hapi.wire.labels import LabelKind

MOST_CLASSES = 100
"""Most classes of a confusion matrix."""
WORST_SAMPLES = 20
_MOST_VALUES = 8
"""Most classes or numbers of one sample that are told."""


class Findings:
    """Collects them over batches on the CPU.

    Args:
        kind: kind of the labels.
        classes: names of the classes or outputs.
    """

    def __init__(self, kind: LabelKind, classes: Sequence[str]) -> None:
        self._kind, self._classes = kind, tuple(classes)
        few = kind == "single" and len(classes) <= MOST_CLASSES
        self._matrix = torch.zeros(len(classes) ** 2, dtype=torch.int64) if few else None
        self._worst: list[dict[str, Any]] = []

    def update(
        self, ids: Sequence[int], outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor
    ) -> None:
        """Add a batch.

        Args:
            ids: the n samples.
            outputs: float32 [n, k].
            targets: int64 [n] or float32 [n, k].
            losses: [n], of each sample.
        """
        if self._matrix is not None:
            cells = targets * len(self._classes) + outputs.argmax(1)
            self._matrix += torch.bincount(cells, minlength=len(self._matrix))
        ranked = losses.double().nan_to_num(nan=math.inf, posinf=math.inf)
        for row in ranked.topk(min(WORST_SAMPLES, len(ranked))).indices.tolist():
            if len(self._worst) == WORST_SAMPLES and ranked[row].item() <= self._worst[-1]["loss"]:
                break
            facts = self._facts(outputs[row], targets[row])
            self._worst.append({"id": int(ids[row]), **facts, "loss": ranked[row].item()})
            self._worst.sort(key=lambda sample: (-sample["loss"], sample["id"]))
            del self._worst[WORST_SAMPLES:]

    def _facts(self, outputs: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Label, prediction, and the probability that the network gives to its prediction, where there is one."""
        if self._kind == "single":
            chosen = int(outputs.argmax())
            probability = outputs.double().softmax(0)[chosen].item()
            return {
                "label": self._classes[int(target)], "predicted": self._classes[chosen], "probability": probability,
            }  # fmt: skip
        if self._kind == "multi":
            label, predicted = (self._names(chosen) for chosen in (target >= 0.5, outputs > 0))
        else:
            label, predicted = (_numbers(values) for values in (target, outputs))
        return {"label": label, "predicted": predicted, "probability": None}

    def _names(self, chosen: torch.Tensor) -> str:
        found = [self._classes[number] for number in chosen.nonzero().flatten().tolist()]
        return _joined(found) or "none"

    @property
    def confusion(self) -> list[list[int]] | None:
        """Samples by class (row) and prediction (column); None for more than 100 classes and for other labels."""
        size = len(self._classes)
        return None if self._matrix is None else self._matrix.view(size, size).tolist()

    @property
    def worst(self) -> list[dict[str, Any]]:
        """Up to 20 samples with the highest loss, highest first: id, label, predicted, probability, loss."""
        return list(self._worst)


def _numbers(values: torch.Tensor) -> str:
    return _joined([f"{value:.6g}" for value in values.tolist()])


def _joined(words: list[str]) -> str:
    return ", ".join(words[:_MOST_VALUES]) + (", ..." if len(words) > _MOST_VALUES else "")
