"""Tables of labels: CSV and its relatives, JSON-lines and Parquet, as files' names with the cells of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hapi.errors import UsageError
from hapi.ingest.labels.delimited import decoded, records
from hapi.ingest.labels.file import MAX_TABLE_BYTES, LabelFile, StoredFile, content_of
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.sources.folder import EXTENSIONS
from hapi.text import printable
from hapi.wire.documents import parse_document

FILE_COLUMNS = ("path", "file", "filename", "file_name", "image", "name")
"""Columns that are taken for the files' names, the first that is there."""
_NAMED = 20
"""Columns that a message lists."""
Cell = Any
"""Text, or a number, truth value, list or nothing of JSON and Parquet."""


@dataclass(frozen=True)
class Table:
    """Files and the cells of their labels."""

    path: LabelFile
    columns: tuple[str, ...]
    """Names of the columns that are the label."""
    files: list[str]
    """Names of files as the table has them."""
    cells: list[list[Cell]]
    """For each column, one for each file."""
    lines: list[int]
    """Number of each row, from 1: of its line, in Parquet of the row."""

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        word = "row" if self.path.suffix.lower() == ".parquet" else "line"
        return f"{self.path} {word} {self.lines[row]}"


def read_table(options: LabelOptions) -> Table:
    """Read the table that the options name.

    Raises:
        UsageError: it cannot be read, has no such column, or a row is incomplete; one line with file and line.
    """
    path = options.table
    if path is None:
        raise UsageError("there is no table of labels; give one with --labels FILE")
    what, suffix = f"--labels {path}", path.suffix.lower()
    if suffix == ".parquet":
        return _from_parquet(path, what, options)
    text = decoded(content_of(path, MAX_TABLE_BYTES, what), what)
    if suffix in (".jsonl", ".ndjson"):
        return _from_json_lines(path, text, what, options)
    return _from_text(path, text, what, options)


def _from_text(path: LabelFile, text: str, what: str, options: LabelOptions) -> Table:
    rows = records(text, what)
    line, first = next(rows)
    header = tuple(first) if _is_header(first, options) else None
    numbers = tuple(str(number) for number in range(1, len(first) + 1))
    file, label = _chosen(header or numbers, header is not None, what, options)
    body = rows if header else chain([(line, first)], rows)
    names = header or tuple(f"column {number}" for number in numbers)
    found = [(number, cells[file], [cells[at] for at in label]) for number, cells in body]
    return _table(path, what, tuple(names[at] for at in label), found)


def _is_header(first: Sequence[str], options: LabelOptions) -> bool:
    """Whether a first row names the columns: it has the names that the user gave, or nothing that a sample has."""
    wanted = [*options.label_columns, *filter(None, (options.label_file_column,))]
    known = {*(name for name in wanted if not name.isdigit()), *FILE_COLUMNS}
    if any(cell in known or cell.lower() in FILE_COLUMNS for cell in first):
        return True
    if any(not cell or _is_number(cell) or cell.lower().endswith(EXTENSIONS) for cell in first):
        return False
    return len(set(first)) == len(first)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _from_json_lines(path: LabelFile, text: str, what: str, options: LabelOptions) -> Table:
    objects: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = parse_document(line.encode())
        except ValueError as error:
            raise UsageError(f"{what} line {number}: is no JSON: {str(error)[:200]}") from None
        if not isinstance(document, dict):
            raise UsageError(
                f'{what} line {number}: is no JSON object, such as {{"file": "1.png", "label": "cat"}}'
            )
        objects.append((number, document))
    if not objects:
        raise UsageError(f"{what}: has no rows")
    names = tuple(objects[0][1])
    file, label = _chosen(names, True, what, options)
    rows = [(number, one.get(names[file]), [one.get(names[at]) for at in label]) for number, one in objects]
    return _table(path, what, tuple(names[at] for at in label), rows)


def _from_parquet(path: LabelFile, what: str, options: LabelOptions) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{what}: Parquet files need pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        if isinstance(path, StoredFile):
            file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content_of(path, MAX_TABLE_BYTES, what)))
        elif path.stat().st_size > MAX_TABLE_BYTES:
            raise UsageError(f"{what}: has more than {MAX_TABLE_BYTES} bytes, too many for this")
        else:
            file = pyarrow.parquet.ParquetFile(path)
        names = tuple(file.schema_arrow.names)
        at, label = _chosen(names, True, what, options)
        chosen = file.read(columns=[names[at], *(names[n] for n in label)])
        columns = [chosen.column(name).to_pylist() for name in (names[at], *(names[n] for n in label))]
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{what}: cannot be read: {str(error).splitlines()[0][:200]}") from None
    rows = [(number, cells[0], list(cells[1:])) for number, cells in enumerate(zip(*columns, strict=True), 1)]
    return _table(path, what, tuple(names[n] for n in label), rows)


def _chosen(names: tuple[str, ...], named: bool, what: str, options: LabelOptions) -> tuple[int, list[int]]:
    """Places of the files' column and of the label's columns."""
    label = [_place(names, named, name, what, "--label") for name in options.label_columns]
    free = [at for at in range(len(names)) if at not in label]
    if options.label_file_column is not None:
        file = _place(names, named, options.label_file_column, what, "--label-file-column")
    else:
        lower = [name.lower() for name in names]
        usual = [lower.index(name) for name in FILE_COLUMNS if name in lower]
        file = next((at for at in (*usual, *free) if at in free), -1)
    if file in label or file < 0:
        raise UsageError(f"{what}: no column is left for the files' names; {_existing(names, named)}")
    if not label:
        label = [at for at in free if at != file]
        if len(label) != 1:
            raise UsageError(f"{what}: give the label's column with --label; {_existing(names, named)}")
    return file, label


def _place(names: tuple[str, ...], named: bool, name: str, what: str, flag: str) -> int:
    if names.count(name) > 1:
        raise UsageError(f"{what}: two columns are named {printable(name)!r}; give its number")
    if name in names:
        return names.index(name)
    if name.isascii() and name.isdigit() and 1 <= int(name[:9]) <= len(names):
        return int(name) - 1
    raise UsageError(
        f"{what}: {flag} {printable(name)!r}: there is no such column; {_existing(names, named)}"
    )


def _existing(names: tuple[str, ...], named: bool) -> str:
    if not named:
        return f"it has no header: columns are named by number, 1 to {len(names)}"
    more = ", ..." if len(names) > _NAMED else ""
    return f"its columns are {', '.join(map(printable, names[:_NAMED]))}{more}"


def _table(
    path: LabelFile, what: str, columns: tuple[str, ...], rows: Sequence[tuple[int, Cell, list[Cell]]]
) -> Table:
    if not rows:
        raise UsageError(f"{what}: has no rows below its header")
    table = Table(
        path,
        columns,
        files=["" if file is None or isinstance(file, bool) else str(file).strip() for _, file, _ in rows],
        cells=[[cells[at] for _, _, cells in rows] for at in range(len(columns))],
        lines=[number for number, _, _ in rows],
    )
    for row, (_, file, _) in enumerate(rows):
        if not table.files[row] or not isinstance(file, str | int):
            raise UsageError(f"--labels {table.place(row)}: has no file's name; give it, or remove the row")
    return table
