"""A folder of images whose labels are in a table: FOLDER/**/image, whatever its folders are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hapi.errors import UsageError
from hapi.ingest.labels.matching import LabelledFiles, names_of
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.skipped import Skipped
from hapi.ingest.sources.folder import EXTENSIONS, FolderSource
from hapi.text import counted


class LabelledFolder(FolderSource):
    """The images that have a row in the table, in the order of their folders and names."""

    def __init__(
        self, root: Path, options: LabelOptions, classes: tuple[str, ...] | None, store: Path | None = None
    ) -> None:
        """Scan ``root`` for the files in the table of ``options``.

        Args:
            root: the folder.
            options: the table.
            classes: names of all classes in their order; None: those of the table.
            store: folder of a store that may lie inside, which is left out.

        Raises:
            UsageError: files have no rows or rows no files, unless the options say to leave them out.
        """
        self._table = LabelledFiles.read(options, classes, names_of(root))
        self._skip = options.skip_unmatched
        self._rows: list[int] = []
        self._unmatched = 0
        self._example = ""
        super().__init__(root, store)
        self.classes, self.label_kind = self._table.labels.classes, self._table.labels.kind

    def _class_names(self) -> tuple[str, ...]:
        """One nameless class: the folder itself."""
        return ("",)

    def _scan(self) -> None:
        ends = np.fromiter(self._class_files(""), dtype=np.int64)
        where, table = f"folder {self.root}", self._table
        if not len(ends):
            if not self._unmatched:
                raise UsageError(f"{self.root} has no images ({', '.join(EXTENSIONS)}) in it")
            raise table.no_match(self._example, where)
        rows = np.array(self._rows, dtype=np.int64)
        if not self._skip:
            table.check_files(self._unmatched, self._example, where)
            table.check_rows(rows, where)
        absent = len(table.missing(rows))
        parts = [f"{counted(self._unmatched, 'file')} without a row"] if self._unmatched else []
        parts += [f"{counted(absent, 'row')} without a file"] if absent else []
        if parts:
            self.note = f"left out: {' and '.join(parts)} of {table.table.path}"
        if self._unmatched:
            line = f"{self._example} has no row in {table.table.path}"
            self.unmatched = Skipped(self._unmatched, [line])
        file = table.table.path
        if isinstance(file, Path) and file.resolve().is_relative_to(self.root.resolve()):
            self._left_out -= 1  # the table itself
        self._ends, self.labels = ends, table.of(rows)

    def _accepts(self, path: str) -> bool:
        """Whether the file has a row; it is remembered."""
        if any(part.startswith(".") for part in Path(path).parts):
            return False
        row = self._table.row_of(path)
        if row is None:
            self._example = self._example or path
            self._unmatched += 1
            return False
        self._rows.append(row)
        return True
