"""Tables as text: rows of cells divided by commas, tabs, semicolons, bars, or any white space."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterator
from itertools import islice

from hapi.errors import UsageError

Record = tuple[int, list[str]]
"""Number of the line that a row ends in, and its cells."""
DELIMITERS = (",", "\t", ";", "|")
_LOOKED_AT = 100
"""Rows from which the delimiter is found."""
_CELL_CHARACTERS = 1 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes, what: str) -> str:
    """Return the text of a file, with or without a byte-order mark; :class:`UsageError` naming ``what``."""
    encoding, name = ("utf-16", "UTF-16") if data.startswith(_UTF16) else ("utf-8-sig", "UTF-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{what} line {line}: is no {name} text; save it as UTF-8") from None


def records(text: str, what: str) -> Iterator[Record]:
    """Yield the rows of a table, all with as many cells as the first; empty lines are left out.

    Raises:
        UsageError: there is no delimiter, a quote does not end, or a row has more or fewer cells.
    """
    read = _reader(text, what)
    width = 0
    for line, cells in read(text):
        width = width or len(cells)
        if len(cells) != width:
            raise UsageError(
                f"{what} line {line}: has {len(cells)} cells, the first row has {width}; quote a cell that holds the "
                "delimiter"
            )
        yield line, cells


def _reader(text: str, what: str) -> Callable[[str], Iterator[Record]]:
    """The way of reading under which the most rows have as many cells as the first, at least two."""

    def reading(delimiter: str) -> Callable[[str], Iterator[Record]]:
        return lambda text: _separated(text, delimiter, what)

    best: tuple[float, Callable[[str], Iterator[Record]]] | None = None
    problem: UsageError | None = None
    for read in (*(reading(delimiter) for delimiter in DELIMITERS), _spaced):
        try:
            widths = [len(cells) for _, cells in islice(read(text), _LOOKED_AT)]
        except UsageError as error:
            problem = problem or error
            continue
        if not widths:
            raise UsageError(f"{what}: has no rows")
        fit = widths.count(widths[0]) / len(widths) if widths[0] > 1 else 0.0
        if fit and (best is None or fit > best[0]):
            best = fit, read
    if best is None:
        raise problem or UsageError(
            f"{what}: has one column; a table needs a column with the files' names and one with their labels, divided "
            "by commas, tabs, semicolons, bars or spaces"
        )
    return best[1]


def _separated(text: str, delimiter: str, what: str) -> Iterator[Record]:
    csv.field_size_limit(_CELL_CHARACTERS)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{what} line {reader.line_num}: {error}") from None


def _spaced(text: str) -> Iterator[Record]:
    for number, line in enumerate(io.StringIO(text), 1):
        if cells := line.split():
            yield number, cells
