"""Figures of a training as two tables: ``steps.csv`` and ``epochs.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hapi.atomic import write_atomically
from hapi.train.callbacks import TrainingStart
from hapi.train.loggers.base import MetricLogger, finite


class CsvLogger(MetricLogger):
    """Writes ``steps.csv`` and ``epochs.csv`` into a folder; needs no library.

    A column that comes later (a metric of a resumed training) is empty in the rows before it.
    """

    title = "csv"
    _epochs: Sequence[Mapping[str, float]] | None = None
    """Rows of all epochs; None before it is opened."""

    def open(self, start: TrainingStart, step: int) -> None:
        """Keep the rows of the steps that are done, and of the epochs before a resume."""
        if not step:
            (self.folder / "steps.csv").unlink(missing_ok=True)
        self._steps = _Table(self.folder / "steps.csv", step)
        if self._epochs is None:
            self._epochs = [finite(entry) for entry in start.epochs]
        self._write_epochs(self._epochs)

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Append a row."""
        self._steps.append({"step": step, **figures})

    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the table of the epochs, with one more."""
        self._epochs = [*(self._epochs or []), figures]
        self._write_epochs(self._epochs)

    def _write_epochs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.folder / "epochs.csv", _text(_columns(rows), rows).encode())


class _Table:
    """A table of steps that grows by rows; what a killed process left of a row is not read."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the table at ``path``, with its rows of the first ``step`` steps; OSError when that fails."""
        self._path = path
        self._columns: list[str] = []
        self._rewrite([row for row in self._rows() if int(row["step"]) <= step])

    def _rows(self) -> list[Mapping[str, Any]]:
        if not self._path.exists():
            return []
        text = self._path.read_text(encoding="utf-8")
        lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        return [row for row in lines if (row.get("step") or "").isdecimal() and None not in row.values()]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._columns = _columns(rows)
        write_atomically(self._path, _text(self._columns, rows).encode())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one more row; OSError when that fails."""
        if not set(row) <= set(self._columns):
            self._rewrite([*self._rows(), row])
            return
        line = io.StringIO()
        csv.DictWriter(line, self._columns, lineterminator="\n").writerow(dict(row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line.getvalue())


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all rows, in the order that they came."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _text(columns: list[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if columns:
        writer.writeheader()
    for row in rows:
        writer.writerow(row)
    return text.getvalue()
