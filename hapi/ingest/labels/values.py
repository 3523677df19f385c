"""Cells of a table, or an array, as labels: their kind, their classes and their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from hapi.arrays import LabelArray
from hapi.data.manifest import check_classes
from hapi.errors import BadRequestError, UsageError
from hapi.ingest.in_place.labels import MAX_NAMES
from hapi.ingest.labels.options import WantedKind
from hapi.ingest.labels.table import Cell, Table
from hapi.text import counted, printable
from hapi.wire.labels import MAX_WIDTH, LabelKind

_WHOLE = re.compile(r"[+-]?[0-9]{1,1000}", re.ASCII)
_NUMBER = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.I
)
_BETWEEN = re.compile("[;|]")
"""Characters between the labels of one cell."""


@dataclass(frozen=True)
class Labels:
    """Labels of n rows."""

    values: LabelArray
    kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes, or of the outputs of a regression."""


def labels_of(table: Table, wanted: WantedKind, given: tuple[str, ...] | None) -> Labels:
    """Return the labels of a table's rows.

    Args:
        table: the table.
        wanted: their kind; ``auto``: one column of texts or whole numbers is single, several of 0 and 1 are
            multi, other numbers are a regression.
        given: names of all classes in their order; None: those that the table has, sorted, or the names of its
            columns.

    Raises:
        UsageError: a cell is empty or no such label; the message names its line.
    """
    reading = _Reading(table, given)
    kind = reading.found_kind() if wanted == "auto" else wanted
    if kind == "single":
        found = reading.single()
    elif kind == "regression":
        found = reading.numbers("regression")
    elif len(table.columns) > 1 or reading.is_binary(0):
        found = reading.numbers("multi")
    else:
        found = reading.sets()
    try:
        check_classes(found.classes)
    except BadRequestError as error:
        raise UsageError(f"--labels {table.path}: {error}") from None
    return found


class _Reading:
    """Reads a table's cells as labels of one kind or another."""

    def __init__(self, table: Table, given: tuple[str, ...] | None) -> None:
        self._table, self._given = table, given

    def _fail(self, row: int, column: int, problem: str) -> NoReturn:
        table = self._table
        raise UsageError(f"--labels {table.place(row)}, {printable(table.columns[column])}: {problem}")

    def _texts(self, column: int) -> list[str]:
        """The cells of a column as texts; none is empty."""
        texts: list[str] = []
        for row, cell in enumerate(self._table.cells[column]):
            text = _text(cell)
            if text is None:
                self._fail(row, column, f"{printable(repr(cell))} is no label")
            if not text:
                self._fail(row, column, "the cell is empty; fill it in, or remove the row")
            texts.append(text)
        return texts

    def found_kind(self) -> LabelKind:
        """The kind that the values tell of."""
        if len(self._table.columns) > 1:
            binary = all(self.is_binary(column) for column in range(len(self._table.columns)))
            return "multi" if binary else "regression"
        if any(isinstance(cell, list | tuple) for cell in self._table.cells[0]):
            return "multi"
        texts = self._texts(0)
        if all(_NUMBER.fullmatch(text) for text in texts) and not all(
            _WHOLE.fullmatch(text) for text in texts
        ):
            return "regression"
        return "single"

    def is_binary(self, column: int) -> bool:
        """True if every cell of a column is 0 or 1."""
        cells = self._table.cells[column]
        return all(
            not isinstance(cell, list | tuple) and _binary(_text(cell) or "") is not None for cell in cells
        )

    def single(self) -> Labels:
        """One class a row."""
        if len(self._table.columns) != 1:
            raise UsageError(
                f"--labels {self._table.path}: a single label has one column, not {len(self._table.columns)} "
                f"({', '.join(map(printable, self._table.columns[:5]))}); leave columns or --label-kind out"
            )
        texts = self._texts(0)
        classes = self._classes(texts, list(range(len(texts))))
        numbers = {name: number for number, name in enumerate(classes)}
        if self._given is not None and not set(texts) & set(
            numbers
        ):  # the numbers of classes, not their names
            numbers = {str(number): number for number in range(len(classes))}
        for row, text in enumerate(texts):
            if text not in numbers:
                self._fail(
                    row, 0, f"the label {printable(text)!r} is not among --classes; add it, or mend the row"
                )
        return Labels(np.array([numbers[text] for text in texts], dtype=np.int64), "single", classes)

    def sets(self) -> Labels:
        """Several classes a row, in one cell."""
        rows: list[list[str]] = []
        for row, cell in enumerate(self._table.cells[0]):
            if not isinstance(cell, list | tuple) and _text(cell) is None:
                self._fail(row, 0, f"{printable(repr(cell))} is no label")
            parts = list(cell) if isinstance(cell, list | tuple) else _BETWEEN.split(_text(cell) or "")
            texts = [(_text(part) or "").strip() for part in parts]
            if isinstance(cell, list | tuple) and "" in texts:
                self._fail(row, 0, "a label in the list is empty or no text")
            if not isinstance(cell, list | tuple) and not any(texts):
                self._fail(row, 0, "the cell is empty; for rows without a label give columns of 0 and 1")
            rows.append([text for text in texts if text])
        flat = [(text, row) for row, texts in enumerate(rows) for text in texts]
        classes = self._classes([text for text, _ in flat], [row for _, row in flat])
        self._check_width(len(classes))
        numbers = {name: number for number, name in enumerate(classes)}
        values = np.zeros((len(rows), len(classes)), dtype=np.float32)
        for text, row in flat:
            if text not in numbers:
                self._fail(
                    row, 0, f"the label {printable(text)!r} is not among --classes; add it, or mend the row"
                )
            values[row, numbers[text]] = 1
        return Labels(values, "multi", classes)

    def numbers(self, kind: LabelKind) -> Labels:
        """A number for each row and column."""
        columns = self._table.columns
        self._check_width(len(columns))
        if self._given is not None and len(self._given) != len(columns):
            raise UsageError(
                f"--labels {self._table.path}: --classes has {counted(len(self._given), 'name')} for "
                f"{counted(len(columns), 'column')}; give one each"
            )
        values = np.empty((len(self._table.files), len(columns)), dtype=np.float32)
        for column in range(len(columns)):
            for row, text in enumerate(self._texts(column)):
                values[row, column] = self._number(row, column, text, kind)
        return Labels(values, kind, self._given or columns)

    def _number(self, row: int, column: int, text: str, kind: LabelKind) -> float:
        if kind == "multi":
            found = _binary(text)
            if found is None:
                self._fail(
                    row,
                    column,
                    f"{printable(text)!r} is neither 0 nor 1; for numbers give --label-kind regression",
                )
            return found
        if not _NUMBER.fullmatch(text):
            more = (
                "; several columns are numbers, or 0 and 1: name one column of classes, or join them as a;b in one "
                "and give --label-kind multi"
            )
            more = more if len(self._table.columns) > 1 else ""
            self._fail(row, column, f"{printable(text)!r} is no number{more}")
        number = float(text)
        if not math.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
            self._fail(
                row, column, f"{printable(text)} is no finite number of 32 bits; mend or remove the row"
            )
        return number

    def _classes(self, texts: Sequence[str], rows: Sequence[int]) -> tuple[str, ...]:
        """The classes that were given, or all that there are, sorted: whole numbers and others by their size."""
        if self._given is not None:
            return self._given
        names = set(texts)
        for text, row in zip(texts, rows, strict=True):
            if len(text) > 1000 or not text.isprintable():
                self._fail(row, 0, f"{printable(text)!r} is no name of a class")
        if len(names) > MAX_NAMES:
            raise UsageError(
                f"--labels {self._table.path}: there are {len(names)} different labels: these are no classes; "
                "give --label-kind regression for numbers, or another column"
            )
        if not names:
            raise UsageError(
                f"--labels {self._table.path}: no row has a label; give the classes with --classes"
            )
        if all(_WHOLE.fullmatch(name) for name in names):
            return tuple(sorted(names, key=lambda name: (int(name), name)))
        if all(_NUMBER.fullmatch(name) for name in names):
            return tuple(sorted(names, key=lambda name: (float(name), name)))
        return tuple(sorted(names))

    def _check_width(self, width: int) -> None:
        if width > MAX_WIDTH:
            raise UsageError(
                f"--labels {self._table.path}: a label would have {width} values, at most {MAX_WIDTH} are allowed"
            )


def _text(cell: Cell) -> str | None:
    """A cell as text, empty if it has nothing; None for what is no label."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, str):
        return cell.strip()
    return repr(cell) if isinstance(cell, int | float) else None


def _binary(text: str) -> float | None:
    """0 or 1; None for anything else."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if number in (0.0, 1.0) else None


def array_labels(values: np.ndarray, wanted: WantedKind, given: tuple[str, ...] | None, what: str) -> Labels:
    """Return the labels in an array of numbers, [n] or [n, k], of a kind that is not single.

    Raises:
        UsageError: a value is no label of this kind, or the array has another form.
    """
    if values.ndim not in (1, 2) or values.dtype.kind not in "iufb" or not values.size:
        raise UsageError(
            f"{what}: expected numbers of shape [n] or [n, k], got {values.dtype} of {values.shape}"
        )
    flat = values.reshape(len(values), -1)
    classes = given or tuple(str(number) for number in range(flat.shape[1]))
    if len(classes) != flat.shape[1] or len(classes) > MAX_WIDTH:
        raise UsageError(
            f"{what}: {counted(flat.shape[1], 'value')} in a label, and {counted(len(classes), 'name')}; give as "
            f"many as values, at most {MAX_WIDTH}"
        )
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(flat, dtype=np.float32)
    kind: LabelKind = "multi" if wanted == "multi" else "regression"
    sound = np.isin(narrow, (0, 1)) if kind == "multi" else np.isfinite(narrow)
    if not sound.all():
        row, column = (int(at) for at in np.argwhere(~sound)[0])
        expected = "0 or 1" if kind == "multi" else "a finite number of 32 bits"
        raise UsageError(f"{what}: the label of sample {row} has {flat[row, column]}, expected {expected}")
    return Labels(narrow, kind, classes)
