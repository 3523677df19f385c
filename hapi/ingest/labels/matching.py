"""Rows of a table by the files that they name."""

from __future__ import annotations

import os
import posixpath
import unicodedata
from collections.abc import Sequence

import numpy as np
import xxhash

from hapi.arrays import IntArray, LabelArray
from hapi.errors import UsageError
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.labels.table import Table, read_table
from hapi.ingest.labels.values import Labels, labels_of
from hapi.text import counted, printable

_REMEDY = "or pass --skip-unmatched to leave such files and rows out"


class LabelledFiles:
    """Labels by file: the path from the folder, or the whole one, with or without its extension."""

    def __init__(self, table: Table, labels: Labels, roots: Sequence[str] = ()) -> None:
        """Take the rows of ``table`` with their ``labels``, of files in a folder with the names ``roots``.

        Raises:
            UsageError: two rows give one file different labels.
        """
        self.table, self.labels = table, labels
        self._rows: dict[str, int] = {}
        beginnings = tuple(dict.fromkeys(_normal(root).rstrip("/") + "/" for root in roots))
        for row, file in enumerate(table.files):
            first = self._rows.setdefault(_below(_normal(file), beginnings), row)
            if first != row and not np.array_equal(labels.values[first], labels.values[row]):
                raise UsageError(
                    f"--labels {table.place(row)}: {printable(file)} has another label than in line "
                    f"{table.lines[first]}; remove one of them"
                )
        self._stems: dict[str, int] | None = None

    @classmethod
    def read(
        cls, options: LabelOptions, classes: tuple[str, ...] | None, roots: Sequence[str] = ()
    ) -> LabelledFiles:
        """Read a table of labels.

        Args:
            options: the table and its columns.
            classes: names of all classes in their order; None: those of the table; see :func:`labels_of`.
            roots: names of the files' folder: whole paths, or a store's URL with a prefix.
        """
        table = read_table(options)
        return cls(table, labels_of(table, options.label_kind, classes), roots)

    @property
    def files(self) -> int:
        """Number of different files."""
        return len(self._rows)

    def row_of(self, path: str) -> int | None:
        """Return the first row of a file, or of a sample named without an extension; None without one."""
        name = _normal(path)
        found = self._rows.get(name)
        if found is None:
            stem, extension = os.path.splitext(name)  # noqa: PTH122  a key, not a path of this system
            found = self._rows.get(stem) if extension else None
        return self._by_stem().get(name) if found is None else found

    def _by_stem(self) -> dict[str, int]:
        """Rows by name without an extension, where that is one row's alone."""
        if self._stems is None:
            stems: dict[str, int] = {}
            for name, row in self._rows.items():
                stem = os.path.splitext(name)[0]  # noqa: PTH122  a key, not a path of this system
                stems[stem] = -1 if stem in stems else row
            self._stems = {stem: row for stem, row in stems.items() if row >= 0}
        return self._stems

    def of(self, rows: IntArray) -> LabelArray:
        """Return the labels of ``rows``."""
        return self.labels.values[rows]

    def fingerprint(self) -> str:
        """Return the digest of the files' names, which the numbers of rows stand for."""
        state = xxhash.xxh3_128()
        for file in self.table.files:
            state.update(file.encode("utf-8", "surrogatepass") + b"\0")
        return state.hexdigest()

    def check_files(self, unmatched: int, example: str, where: str) -> None:
        """Raise :class:`UsageError` for ``unmatched`` files in ``where`` without a row, if there are any."""
        if unmatched:
            raise UsageError(
                f"{where}: {printable(example)}{_and_more(unmatched)} has no row in {self.table.path}; add rows, "
                f"{_REMEDY}"
            )

    def missing(self, rows: IntArray) -> list[int]:
        """Return the rows that are not among ``rows``, ascending, each file's first."""
        used = np.zeros(len(self.table.files), dtype=np.bool_)
        used[rows] = True
        return [row for row in self._rows.values() if not used[row]]

    def check_rows(self, rows: IntArray, where: str) -> None:
        """Check that the files found in ``where`` have the ``rows`` of all files, each one of its own.

        Raises:
            UsageError: a row's file does not exist, or two files have one row.
        """
        counts = np.bincount(rows, minlength=1)
        if counts.max(initial=0) > 1:
            row = int(np.argmax(counts > 1))
            raise UsageError(
                f"--labels {self.table.place(row)}: {printable(self.table.files[row])} fits {counts[row]} files in "
                f"{where}; name each with its extension"
            )
        absent = self.missing(rows)
        if absent:
            raise UsageError(
                f"--labels {self.table.place(absent[0])}: there is no {printable(self.table.files[absent[0]])} in "
                f"{where}{_and_more(len(absent), 'row')}; mend or remove it, {_REMEDY}"
            )

    def no_match(self, example: str, where: str) -> UsageError:
        """Return the error that no file in ``where``, such as ``example``, has a row."""
        return UsageError(
            f"--labels {self.table.path}: none of its rows names a file in {where}: {self.table.place(0)} has "
            f"{printable(self.table.files[0])}, a file there is {printable(example)}; give the folder that the names "
            "count from, or their column with --label-file-column"
        )


def _and_more(count: int, word: str = "") -> str:
    """Words for a first one of ``count``."""
    return (
        ""
        if count == 1
        else f" (and {counted(count - 1, f'more such {word}') if word else f'{count - 1} more'})"
    )


def names_of(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the whole paths of a folder: as it is called, and without links."""
    return os.path.abspath(folder), os.path.realpath(folder)  # noqa: PTH100  pathlib keeps ".."


def _below(name: str, beginnings: tuple[str, ...]) -> str:
    """The part of a name behind the first of ``beginnings`` that it has; the name if it has none."""
    start = next((start for start in beginnings if name.startswith(start)), "")
    return name[len(start) :]


def _normal(name: str) -> str:
    """A name as it is compared: with slashes, without ``./`` before it, accents in one form."""
    text = name.replace("\\", "/")
    if text.startswith("/"):
        text = posixpath.normpath(text)
    while text.startswith("./"):
        text = text[2:]
    return text if text.isascii() else unicodedata.normalize("NFC", text)
