"""Predictions as rows of a table, by the kind of the model's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hapi.api.inference import Outputs
from hapi.wire.labels import LabelKind

Found = list[tuple[str, float]]
"""Names of classes with their probabilities, the likeliest first; or all outputs with their numbers."""


class PredictionRows:
    """Makes rows of outputs, and counts how many are as labelled (one class for each sample only).

    Args:
        classes: names of the outputs.
        kind: their meaning.
        top: classes to name for each sample.
    """

    def __init__(self, classes: Sequence[str], kind: LabelKind, top: int) -> None:
        self._classes, self._kind = tuple(classes), kind
        self._top = min(top, len(classes))
        self.right = self.labelled = 0
        """Samples with a label, and those of them whose likeliest class it is."""

    @property
    def header(self) -> list[str]:
        """Titles of the cells."""
        if self._kind == "regression":
            return list(self._classes)
        return [column for n in range(1, self._top + 1) for column in (f"class_{n}", f"probability_{n}")]

    def of(self, outputs: Outputs) -> Iterator[tuple[str, str, Found]]:
        """Yield name, label (empty: none) and prediction of each sample."""
        logits = outputs.logits
        if self._kind == "regression":
            predictions: list[Found] = [list(zip(self._classes, row, strict=True)) for row in logits.tolist()]
        else:
            shares = logits.softmax(1) if self._kind == "single" else logits.sigmoid()
            best = shares.topk(self._top)
            predictions = [
                [(self._classes[i], value) for i, value in zip(numbers, values, strict=True)]
                for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        for name, label, found in zip(outputs.names, outputs.labels, predictions, strict=True):
            known = self._label(label)
            if known and self._kind == "single":
                self.labelled += 1
                self.right += known == found[0][0]
            yield name, known, found

    def _label(self, label: Any) -> str:
        if label.ndim == 0:
            return "" if label < 0 else self._classes[label]
        if self._kind == "regression":
            return " ".join(f"{value:.6g}" for value in label)
        return "|".join(name for name, value in zip(self._classes, label, strict=True) if value >= 0.5)

    def cells(self, found: Found) -> list[str]:
        """Return the cells of a prediction."""
        if self._kind == "regression":
            return [f"{value:.6g}" for _, value in found]
        return [cell for name, value in found for cell in (name, f"{value:.6g}")]

    def words(self, found: Found) -> list[str]:
        """Return a prediction for people."""
        if self._kind == "regression":
            return [f"{name} {value:.6g}" for name, value in found]
        return [f"{name} {100 * value:.1f}%" for name, value in found]
