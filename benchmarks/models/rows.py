"""Tables of the benchmark ``models``: one for each of DStore's figures, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.models.settings import (
    COLD,
    FIGURES,
    GOALS,
    HAPI,
    HTTP,
    LOCAL,
    NEED_CUDA,
    ON_DEMAND,
    SAFETENSORS,
    STAGES,
    STORE,
    TORCH,
    WARM,
    WAYS,
    ModelCell,
    Page,
    way_of,
)  # fmt: skip
from benchmarks.models.shapes import WHOLE, shape_of

Record = Mapping[str, Any]

_MOST_MOVED = 1.01
_LEAST_OF_SAFETENSORS = 0.95
_LEAST_RATE = 2.5
"""GB/s over HTTP."""
_LEAST_GAIN = {WARM: 40.0, COLD: 8.0}
"""Seconds of ``torch.load`` over Hapi's, for the convolutions of VGG19."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell's figures."""

    cell: ModelCell
    seconds: float
    """Median over the rounds of the mean over the clients."""
    lowest: float
    highest: float
    nbytes: int
    """Bytes of the tensors that a client wrote or got."""
    moved: float | None
    """Bytes that moved for each byte that was needed: from disks if cold, over the network, or by system calls. None
    where a warm file may be mapped.
    """
    stages: Mapping[str, float]
    """Seconds of each low-level operation, where they were done one by one."""

    @property
    def rate(self) -> float:
        """Bytes per second of all clients."""
        return self.nbytes * self.cell.clients / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        figures = {
            "seconds": self.seconds,
            "lowest": self.lowest,
            "highest": self.highest,
            "bytes": self.nbytes,
        }
        return {
            **self.cell.to_json(),
            **figures,
            "moved": self.moved,
            "bytes_per_second": self.rate,
            "stages": dict(self.stages),
        }


def last_records(records: Sequence[Record]) -> dict[str, Record]:
    """Return the last record of each cell by its key."""
    return {record["cell"]: record for record in records if record["kind"] == "cell"}


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return a row for each cell that was measured."""
    return [_row(record) for record in last_records(records).values()]


def _row(record: Record) -> Row:
    cell = ModelCell.from_json(record)
    return Row(
        cell=cell,
        seconds=statistics.median(record["seconds"]),
        lowest=min(record["seconds"]),
        highest=max(record["seconds"]),
        nbytes=record["bytes"],
        moved=_moved(cell, record),
        stages=record.get("stages", {}),
    )


def _moved(cell: ModelCell, record: Record) -> float | None:
    if cell.part in (STORE, STAGES):
        return None
    if cell.pages == COLD:
        counter = "disk"
    elif cell.place != LOCAL:
        counter = "network"
    elif cell.way in (HAPI, ON_DEMAND):
        counter = "read"
    else:
        return None
    return float(record["moved"][counter] / record["bytes"])


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal, and how far it is reached."""

    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def reached(self) -> bool:
        """Return whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        """Return the goal with its verdict."""
        return {**asdict(self), "reached": self.reached}

    def line(self) -> str:
        """Return it as a line for a person."""
        sign = "at least" if self.at_least else "at most"
        return f"goal, {self.name} {sign} {self.bound:g}: {self.value:.4g}, {'reached' if self.reached else 'missed'}"


def goals_of(records: Sequence[Record]) -> list[Goal]:
    """Return the goals as far as their cells were measured; other ways count by pairs of rounds."""
    found = [record for record in last_records(records).values() if record["group"] == GOALS]
    ours = {ModelCell.from_json(record): record for record in found if record["way"] == HAPI}
    goals = [goal for cell, record in ours.items() for goal in _against_others(cell, record, found)]
    for cell, record in ours.items():
        if cell.place == HTTP and cell.part == WHOLE:
            rate = record["bytes"] / statistics.median(record["seconds"]) / 1e9
            goals.append(Goal(name=f"GB/s over HTTP, {cell.shape}", value=rate, bound=_LEAST_RATE))
    moved = [value for cell, record in ours.items() if (value := _moved(cell, record)) is not None]
    if moved:
        name = "most bytes moved for each that was needed"
        goals.append(Goal(name=name, value=max(moved), bound=_MOST_MOVED, at_least=False))
    return goals


def _against_others(cell: ModelCell, record: Record, others: Sequence[Record]) -> Iterator[Goal]:
    """The goals of a cell beside another way's."""
    if cell.place != LOCAL:
        return
    rival = SAFETENSORS if cell.part == WHOLE else TORCH
    bound = _LEAST_OF_SAFETENSORS if cell.part == WHOLE else _LEAST_GAIN[cell.pages]
    same = ("shape", "part", "place", "pages", "clients")
    for other in others:
        if other["way"] == rival and all(other[name] == record[name] for name in same):
            pairs = zip(other["seconds"], record["seconds"], strict=False)
            value = statistics.median(theirs / ours for theirs, ours in pairs)
            name = f"speed over {way_of(rival).title}'s, {cell.shape}, {cell.part} {cell.pages}"
            yield Goal(name=name, value=value, bound=bound)


def table(records: Sequence[Record]) -> list[str]:
    """Return all tables and goals as lines for a person."""
    rows = rows_of(records)
    lines = [line for page in FIGURES if (mine := page_rows(rows, page)) for line in _page_lines(page, mine)]
    in_goals = [row for row in rows if row.cell.group == GOALS]
    if in_goals:
        lines += [
            "Cells of the goals, measured by turns",
            *_tables(in_goals),
            *[g.line() for g in goals_of(records)],
            "",
        ]
    if not rows:
        return ["nothing was measured yet"]
    lines.append("seconds, the median of the rounds; every byte was put into tensors in memory of their own")
    return [*lines, *left_out(records), NEED_CUDA]


def page_rows(rows: Sequence[Row], page: Page) -> list[Row]:
    """Return the rows that belong to a figure, whole size or small."""
    ways = page.ways or tuple(way.name for way in WAYS)
    return [
        row
        for row in rows
        if not row.cell.group
        and row.cell.shape in page.shapes + page.small
        and row.cell.part in page.parts
        and row.cell.clients in page.clients
        and row.cell.way in ways
    ]


def left_out(records: Sequence[Record]) -> list[str]:
    """Return a line for each way that is missing, and for each cell that failed and was not measured since."""
    done = last_records(records)
    ways = {way.name for way in WAYS if any(record["way"] == way.name for record in done.values())}
    missing = {r["way"]: r["why"] for r in records if r["kind"] == "missing" and r["way"] not in ways}
    failed = {r["cell"]: r["why"] for r in records if r["kind"] == "failed" and r["cell"] not in done}
    return [
        *(f"{way_of(way).title} is left out: {why}" for way, why in missing.items()),
        *(f"{cell} failed: {why}" for cell, why in failed.items()),
    ]


def _page_lines(page: Page, rows: Sequence[Row]) -> list[str]:
    return [f"DStore's Figure {page.number}: {page.title}", *_tables(rows), ""]


def _tables(rows: Sequence[Row]) -> list[str]:
    """A table for each model, place and number of clients."""
    lines: list[str] = []
    for shape, place, clients in dict.fromkeys((r.cell.shape, r.cell.place, r.cell.clients) for r in rows):
        mine = [r for r in rows if (r.cell.shape, r.cell.place, r.cell.clients) == (shape, place, clients)]
        columns = list(dict.fromkeys((row.cell.part, row.cell.pages) for row in mine))
        columns.sort(key=lambda column: (column[0] != STORE, column[1] == COLD))
        several = f", {clients} clients" if clients > 1 else ""
        size = shape_of(shape).nbytes / 1e9
        lines.append(f"  {shape} ({size:.3g} GB), {place}{several}")
        lines.append(
            "  " + " " * 26 + "".join(f"{_column(*column):>14}" for column in columns) + f"{'moved':>9}"
        )
        for way in WAYS:
            cells = {(row.cell.part, row.cell.pages): row for row in mine if row.cell.way == way.name}
            if cells:
                lines.append(_way_line(way.title, [cells.get(column) for column in columns]))
        lines += [_stages_line(row) for row in mine if row.stages]
    return lines


def _way_line(title: str, cells: Sequence[Row | None]) -> str:
    texts = (
        "-" if row is None else f"{row.seconds:.4f}" if row.seconds < 1 else f"{row.seconds:.2f}"
        for row in cells
    )
    moved = [row.moved for row in cells if row is not None and row.moved is not None]
    return (
        f"    {title:<24}"
        + "".join(f"{text:>14}" for text in texts)
        + (f"{max(moved):>9.4f}" if moved else f"{'':>9}")
    )


def _stages_line(row: Row) -> str:
    texts = (f"{stage} {seconds:.4f}" for stage, seconds in row.stages.items())
    return f"    {way_of(row.cell.way).title}, one by one: {', '.join(texts)}"


def _column(part: str, pages: str) -> str:
    return part if part in (STORE, STAGES) else f"{part} {pages}"
