"""Labels found in foreign shards: class numbers, or names that become classes when all are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hapi.arrays import IntArray
from hapi.data.manifest import check_classes
from hapi.errors import BadRequestError, UsageError
from hapi.ingest.formats.shard import Label
from hapi.ingest.sources.base import numbered_classes
from hapi.text import counted, printable

MAX_NAMES = 100_000
"""Most different names of classes; more are, for example, captions."""
_MAX_NUMBER = 999_999

Kind = Literal["numbers", "names", "ignored"]


class LabelError(Exception):
    """Reason why a sample's label cannot be used."""


class LabelBook:
    """Labels of one run of shards as integers: class numbers, or places in ``names``."""

    def __init__(self, ignored: bool) -> None:
        """Begin without labels; ``ignored``: labels come from elsewhere, and each is 0 here."""
        self.kind: Kind | None = "ignored" if ignored else None
        self.names: list[str] = []
        self._number_of: dict[str, int] = {}

    def add(self, label: Label) -> int:
        """Return the integer for this label; :class:`LabelError` when it is none, or of another kind than
        earlier ones.
        """
        if self.kind == "ignored":
            return 0
        if label is None:
            raise LabelError("it has no label; name the label's field with --label, or give --labels FILE")
        kind: Kind = "numbers" if isinstance(label, int) else "names"
        if self.kind not in (None, kind):
            raise LabelError(f"its label {label!r} is not one of the {self.kind} that came before")
        number = self._number(label) if isinstance(label, int) else self._named(label)
        self.kind = kind
        return number

    def _number(self, label: int) -> int:
        if not 0 <= label <= _MAX_NUMBER:
            raise LabelError(f"its label {str(label)[:30]} is no class number (0 to {_MAX_NUMBER})")
        return label

    def _named(self, label: str) -> int:
        if not label or len(label) > 1000 or not label.isprintable():
            raise LabelError(f"its label {printable(label)!r} is no name of a class")
        if label not in self._number_of:
            if len(self.names) >= MAX_NAMES:
                raise UsageError(
                    f"there are more than {MAX_NAMES} different labels, the last is {printable(label)!r}: "
                    "these are no classes; name the label's field with --label"
                )
            self._number_of[label] = len(self.names)
            self.names.append(label)
        return self._number_of[label]


def merged(
    labels: Sequence[IntArray],
    kinds: Sequence[Kind],
    names: Sequence[Sequence[str]],
    given: tuple[str, ...] | None,
) -> tuple[IntArray, tuple[str, ...]]:
    """Return the labels of all samples, int64 [n], and the classes.

    Names that are not given become classes in their order as texts, as in torchvision's ImageFolder.

    Args:
        labels: labels of each run.
        kinds: kind of each run's labels.
        names: names of each run.
        given: classes that the user gave, which go first; None: none.
    """
    if "numbers" in kinds and "names" in kinds:
        number = np.concatenate(
            [part for part, kind in zip(labels, kinds, strict=True) if kind == "numbers"]
        )[0]
        name = names[list(kinds).index("names")][0]
        raise UsageError(
            f"some labels are numbers (like {number}) and some are names (like {printable(name)!r}); "
            "name the label's field with --label, or give --labels FILE"
        )
    if "names" not in kinds:
        numbers = np.concatenate(list(labels))
        return numbers, checked_classes(numbers, given)
    used = [np.unique(part).tolist() for part in labels]
    known = {part[number] for part, numbers in zip(names, used, strict=True) for number in numbers}
    classes = tuple(sorted(known)) if given is None else given
    missing = sorted(known - set(classes))
    if missing:
        raise UsageError(
            f"the label {printable(missing[0])!r} is not among --classes; add it, or leave --classes out"
        )
    if len(known) > MAX_NAMES:
        raise UsageError(
            f"there are {len(known)} different labels, for example {printable(min(known))!r}: these are no classes; "
            "name the label's field with --label"
        )
    class_of = {name: number for number, name in enumerate(classes)}
    tables = [np.array([class_of.get(name, -1) for name in part], dtype=np.int64) for part in names]
    numbers = np.concatenate([table[part] for table, part in zip(tables, labels, strict=True)])
    return numbers, checked_classes(numbers, classes)


def checked_classes(labels: IntArray, given: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the classes for these labels (int64 [n], n > 0); :class:`UsageError` when they do not fit."""
    classes = numbered_classes(labels) if given is None else given
    try:
        check_classes(classes)
    except BadRequestError as error:
        raise UsageError(f"{error}; correct --classes") from None
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(classes):
        raise UsageError(
            f"labels are {low} to {high}, but must be 0 to {len(classes) - 1} for "
            f"{counted(len(classes), 'class')}; "
            "correct the labels, or give --classes"
        )
    return classes
