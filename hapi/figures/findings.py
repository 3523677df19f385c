"""The last validation in detail: accuracy by class, confusion matrix, samples with the highest loss."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.errors import ConfigError
from hapi.figures.fields import Fields
from hapi.figures.markup import decimal, percent, section, table

MOST_CLASSES = 100
"""Most classes that a report lists."""
_MOST_COLUMNS = 30
"""Classes from which the largest confusions are listed instead of the matrix."""
_PAIRS = 30


@dataclass(frozen=True, kw_only=True)
class ClassPart:
    """A class of the validation samples."""

    name: str
    samples: int
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class WorstSample:
    """A validation sample with a high loss; None stands for a loss that is no number."""

    id: int
    label: str
    predicted: str
    probability: float | None
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Details:
    """Details of the last validation."""

    classes: tuple[ClassPart, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Samples by class (row) and prediction (column); empty when the report has none."""
    worst: tuple[WorstSample, ...]

    @classmethod
    def of(cls, f: Fields) -> Details:
        """Parse the report's part; :class:`ConfigError` names the first field that is wrong."""
        classes = tuple(
            ClassPart(name=c.text("name"), samples=c.integer("samples"), accuracy=c.optional("accuracy"))
            for c in f.objects("classes")
        )
        worst = tuple(
            WorstSample(
                id=s.integer("id"),
                label=s.text("label"),
                predicted=s.text("predicted"),
                probability=s.optional("probability"),
                loss=s.optional("loss"),
            )
            for s in f.objects("worst")
        )
        if len(classes) > MOST_CLASSES or len(worst) > MOST_CLASSES:
            raise ConfigError(f"{f.where}: expected at most {MOST_CLASSES} classes and samples")
        return cls(classes=classes, confusion=_confusion(f, len(classes)), worst=worst)


def _confusion(f: Fields, size: int) -> tuple[tuple[int, ...], ...]:
    if not f.has("confusion"):
        return ()
    rows = f.items("confusion")
    sound = len(rows) == size and all(
        isinstance(row, list | tuple)
        and len(row) == size
        and all(type(n) is int and 0 <= n < 1 << 53 for n in row)
        for row in rows
    )
    if not sound:
        raise ConfigError(f"{f.where}.confusion: expected a row of counts for each of {size} classes")
    return tuple(tuple(row) for row in rows)


def findings(details: Details | None) -> str:
    """Return the part of the page; empty without validation."""
    if details is None:
        return ""
    body = _classes(details) + _matrix(details) + _worst(details)
    return section("Validation after the last epoch", body) if body else ""


def _classes(details: Details) -> str:
    rows = [(c.name, str(c.samples), percent(c.accuracy)) for c in details.classes]
    return table("Accuracy of each class", ("Class", "Samples", "Accuracy"), rows) if rows else ""


def _matrix(details: Details) -> str:
    if not details.confusion:
        return ""
    names = [c.name for c in details.classes]
    if len(names) > _MOST_COLUMNS:
        return _pairs(details, names)
    rows = [(name, *map(str, row)) for name, row in zip(names, details.confusion, strict=True)]
    return table("Confusion matrix: samples by class (row) and prediction (column)", ("Class", *names), rows)


def _pairs(details: Details, names: list[str]) -> str:
    found = [
        (count, names[row], names[column])
        for row, counts in enumerate(details.confusion)
        for column, count in enumerate(counts)
        if row != column and count
    ]
    rows = [
        (label, predicted, str(count))
        for count, label, predicted in sorted(found, key=lambda f: (-f[0], f[1:]))[:_PAIRS]
    ]
    head = ("Class", "Predicted", "Samples")
    return table("Most frequent confusions; the report has the whole matrix", head, rows, left={1})


def _worst(details: Details) -> str:
    rows = [(str(s.id), s.label, s.predicted, percent(s.probability), decimal(s.loss)) for s in details.worst]
    head = ("Sample", "Label", "Predicted", "Probability", "Loss")
    return table("Samples with the highest loss", head, rows, left={1, 2}, long={1, 2}) if rows else ""
