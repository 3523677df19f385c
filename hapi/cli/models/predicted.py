"""Lines and rows for a network's outputs, by the kind of its labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hapi.arrays import LabelArray
from hapi.wire.labels import LabelKind

BETWEEN = ";"
"""Character between the labels of one cell."""


class Predicted(ABC):
    """The lines about samples, and the figures of all of them."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.labelled = 0
        """Samples with a label, so far."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Header of a file's columns after the sample's name and label."""

    @abstractmethod
    def rows(self, outputs: torch.Tensor) -> list[tuple[str, list[str]]]:
        """Return a line's text and a file's cells for each row of ``outputs``, float32 [B, outputs]."""

    @abstractmethod
    def label(self, labels: LabelArray, row: int) -> str:
        """Return the label of a row as a cell."""

    @abstractmethod
    def compare(self, outputs: torch.Tensor, labels: LabelArray) -> None:
        """Count how the ``outputs`` of a batch fit its labels."""

    @abstractmethod
    def summary(self) -> str:
        """Return one line for all labelled samples."""


class OneClass(Predicted):
    """The most probable classes, of which one is right."""

    def __init__(self, classes: Sequence[str], top: int) -> None:
        """Name the ``top`` most probable of ``classes``."""
        super().__init__(classes)
        self._top, self._right = min(top, len(classes)), 0

    @property
    def columns(self) -> list[str]:
        """Class and probability of each of the best."""
        return [name for n in range(1, self._top + 1) for name in (f"class_{n}", f"probability_{n}")]

    def rows(self, outputs: torch.Tensor) -> list[tuple[str, list[str]]]:
        """Return the best classes of each row."""
        best = outputs.softmax(1).topk(self._top)
        found: list[tuple[str, list[str]]] = []
        for places, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            pairs = [(self.classes[place], value) for place, value in zip(places, values, strict=True)]
            line = "  ".join(f"{name} {100 * value:.1f}%" for name, value in pairs)
            found.append((line, [cell for name, value in pairs for cell in (name, f"{value:.6g}")]))
        return found

    def label(self, labels: LabelArray, row: int) -> str:
        """Return the name of the class."""
        return self.classes[int(labels[row])]

    def compare(self, outputs: torch.Tensor, labels: LabelArray) -> None:
        """Count samples whose label has the largest output."""
        self.labelled += len(labels)
        self._right += int((outputs.argmax(1) == torch.from_numpy(labels)).sum())

    def summary(self) -> str:
        """Return the share of samples that are as labelled."""
        return _as_labelled(self._right, self.labelled)


class SeveralClasses(Predicted):
    """Each class whose own probability is above a threshold."""

    def __init__(self, classes: Sequence[str], threshold: float, top: int | None) -> None:
        """Name all of ``classes`` above ``threshold``, at most ``top`` in a line."""
        super().__init__(classes)
        self._threshold, self._top, self._right, self._all_right = threshold, top, 0, 0

    @property
    def columns(self) -> list[str]:
        """The labels, and the probability of each class."""
        return ["predicted", *self.classes]

    def rows(self, outputs: torch.Tensor) -> list[tuple[str, list[str]]]:
        """Return the classes above the threshold, the most probable first."""
        found: list[tuple[str, list[str]]] = []
        for values in outputs.sigmoid().tolist():
            order = sorted(range(len(values)), key=lambda place: -values[place])
            above = [place for place in order if values[place] > self._threshold]
            named = [f"{self.classes[place]} {100 * values[place]:.1f}%" for place in above[: self._top]]
            cells = [BETWEEN.join(self.classes[place] for place in above), *(f"{v:.6g}" for v in values)]
            found.append(("  ".join(named) or "-", cells))
        return found

    def label(self, labels: LabelArray, row: int) -> str:
        """Return the names of the classes, with semicolons between them."""
        return BETWEEN.join(
            name for name, value in zip(self.classes, labels[row], strict=True) if value > 0.5
        )

    def compare(self, outputs: torch.Tensor, labels: LabelArray) -> None:
        """Count labels that are right, and samples of which all are."""
        right = (outputs.sigmoid() > self._threshold) == (torch.from_numpy(labels) > 0.5)
        self.labelled += len(labels)
        self._right += int(right.sum())
        self._all_right += int(right.all(1).sum())

    def summary(self) -> str:
        """Return the shares of samples and of single labels that are right."""
        single = 100 * self._right / (self.labelled * len(self.classes))
        return f"{_as_labelled(self._all_right, self.labelled)}, {single:.1f}% of all single labels"


class Numbers(Predicted):
    """The outputs as they are."""

    def __init__(self, classes: Sequence[str]) -> None:
        """Name the outputs ``classes``."""
        super().__init__(classes)
        self._off = torch.zeros(len(classes), dtype=torch.float64)

    @property
    def columns(self) -> list[str]:
        """The outputs' names."""
        return list(self.classes)

    def rows(self, outputs: torch.Tensor) -> list[tuple[str, list[str]]]:
        """Return each output's value."""
        found: list[tuple[str, list[str]]] = []
        for values in outputs.tolist():
            line = "  ".join(f"{name} {value:.6g}" for name, value in zip(self.classes, values, strict=True))
            found.append((line, [f"{value:.9g}" for value in values]))
        return found

    def label(self, labels: LabelArray, row: int) -> str:
        """Return the numbers, with semicolons between them."""
        return BETWEEN.join(f"{value:.9g}" for value in labels[row].tolist())

    def compare(self, outputs: torch.Tensor, labels: LabelArray) -> None:
        """Add up how far off each output is."""
        self.labelled += len(labels)
        self._off += (outputs.double() - torch.from_numpy(labels).double()).abs().sum(0)

    def summary(self) -> str:
        """Return the mean absolute error of each output."""
        errors = zip(self.classes, (self._off / self.labelled).tolist(), strict=True)
        return f"mean absolute error: {', '.join(f'{name} {error:.6g}' for name, error in errors)}"


def predicted_of(kind: LabelKind, classes: Sequence[str], *, top: int | None, threshold: float) -> Predicted:
    """Return the words for outputs of a network that was trained for labels of this kind.

    Args:
        kind: kind of the labels.
        classes: names of the outputs.
        top: classes to name for one sample; None: 5 of a single label, all above the threshold of several.
        threshold: probability from 0 to 1 above which a class of several applies.
    """
    if kind == "single":
        return OneClass(classes, 5 if top is None else top)
    return SeveralClasses(classes, threshold, top) if kind == "multi" else Numbers(classes)


def _as_labelled(right: int, total: int) -> str:
    return f"{right} of {total} as labelled ({100 * right / total:.1f}%)"
