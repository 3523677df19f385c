"""Options for a file of labels, of packing and indexing alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hapi.errors import UsageError
from hapi.ingest.labels.file import LabelFile
from hapi.wire.labels import LabelKind

WantedKind = LabelKind | Literal["auto"]
WANTED_KINDS: tuple[str, ...] = ("auto", *get_args(LabelKind))
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Options for a file of labels."""

    labels: LabelFile | None = None
    """File of labels: one integer for each sample in their order (``.npy``, or text with one a line), or a table
    that names files (CSV, TSV, JSON-lines, Parquet); :func:`hapi.ingest.labels.file.label_file` makes it of a URL."""
    label_columns: tuple[str, ...] = ()
    """Columns of the table that are the label, by name or number from 1; empty: the only other one."""
    label_file_column: str | None = None
    """Column with the files' names; None: ``path``, ``file``, ``filename``, ``file_name``, ``image`` or ``name``,
    otherwise the first."""
    label_kind: WantedKind = "auto"
    """``single``: a class; ``multi``: several columns of 0 and 1, or labels divided by ``;`` in one; ``regression``:
    numbers. ``auto``: by their values."""
    skip_unmatched: bool = False
    """Leave out files without a row, and rows without a file; otherwise the first is an error."""

    @property
    def table(self) -> LabelFile | None:
        """The file of labels if it is a table."""
        if self.labels is None:
            return None
        named = self.label_columns or self.label_file_column is not None
        return self.labels if named or self.labels.suffix.lower() in TABLE_SUFFIXES else None

    def checked(self) -> LabelOptions:
        """Return these options; :class:`UsageError` when one needs a file, a table, or does not exist."""
        if self.label_kind not in WANTED_KINDS:
            raise UsageError(f"label kind {self.label_kind!r}: expected one of {', '.join(WANTED_KINDS)}")
        needing = {
            "--label": bool(self.label_columns),
            "--label-file-column": self.label_file_column is not None,
            "--skip-unmatched": self.skip_unmatched,
        }
        given = next((flag for flag, is_given in needing.items() if is_given), None)
        if self.labels is None and given is not None:
            raise UsageError(f"{given} is for a file of labels; give it with --labels FILE")
        if len(set(self.label_columns)) != len(self.label_columns):
            raise UsageError("--label: a column is named twice")
        if any(not name.strip() for name in self.label_columns):
            raise UsageError("--label: a column has no name")
        return self


def column_names(label: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that a text with commas, or a sequence, names."""
    if label is None:
        return ()
    return tuple(name.strip() for name in label.split(",")) if isinstance(label, str) else tuple(label)
