"""Rows and verdict of the benchmark ``codecs``, from the records of its runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from typing import Any, Self

from benchmarks.codecs.settings import DENSE, DENSE_GOALS, DTYPES, SPARSE, SPARSE_GOAL
from hapi.codecs.choose import CodecFigures, pays_below
from hapi.codecs.names import EXACT, NONE

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CutRow:
    """Features of one cut in one type."""

    model: str
    cut: int
    name: str
    dtype: str
    zeros: float
    """Share of the elements that are zero."""
    nbytes: int
    """Raw bytes that were encoded."""
    figures: tuple[CodecFigures, ...]

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the row of a record of kind ``cut``."""
        values = {name: record[name] for name in ("model", "cut", "name", "dtype", "zeros", "nbytes")}
        return cls(**values, figures=tuple(CodecFigures(**found) for found in record["figures"]))

    @property
    def best(self) -> CodecFigures:
        """The exact codec with the largest ratio, the faster one of equal ones."""
        return max(self.figures, key=lambda f: (round(f.ratio, 2), min(f.encode_rate, f.decode_rate)))

    @property
    def group(self) -> str:
        """Share of zeros, in words."""
        if self.zeros < DENSE:
            return "dense"
        return "sparse" if self.zeros >= SPARSE else "between"

    def to_json(self) -> dict[str, Any]:
        """The figures by name, each codec's with the link rate (bytes/s) below which it pays."""
        figures = {
            f.name: {
                "ratio": round(f.ratio, 4),
                "encode_rate": round(f.encode_rate),
                "decode_rate": round(f.decode_rate),
                "pays_below": round(pays_below(f)),
            }
            for f in self.figures
        }
        return {**asdict(self), "zeros": round(self.zeros, 4), "figures": figures}


def cut_rows(records: Iterable[Record]) -> list[CutRow]:
    """Return the rows in the order of models and cuts; of one cut the last that was measured."""
    found = {(r["model"], r["cut"], r["dtype"]): r for r in records if r["kind"] == "cut"}
    return [CutRow.from_record(record) for record in found.values()]


def sources(records: Iterable[Record]) -> dict[str, str]:
    """Return on what each model was measured, in words."""
    return {r["model"]: r["text"] for r in records if r["kind"] == "source"}


_GROUPS = (
    ("dense", f"under {DENSE:.0%} zeros"),
    ("between", f"{DENSE:.0%} to {SPARSE:.0%} zeros"),
    ("sparse", f"{SPARSE:.0%} zeros and more"),
)


def summary_table(rows: Sequence[CutRow]) -> list[str]:
    """Return a table in Markdown: for each model, type and share of zeros the best exact codec of every cut."""
    columns = (
        "features",
        "zeros",
        "type",
        "cuts",
        "ratio: least, median, largest",
        "GB/s, encoding / decoding",
    )
    lines = [f"| {' | '.join(columns)} | pays below, Gbit/s |", "|---|---|---|---|---|---|---|"]
    for model in dict.fromkeys(row.model for row in rows):
        for group, words in _GROUPS:
            for dtype in DTYPES:
                chosen = [r.best for r in rows if (r.model, r.group, r.dtype) == (model, group, dtype)]
                if chosen:
                    lines.append(f"| {model} | {words} | {dtype} | {len(chosen)} | {_figures(chosen)} |")
    return lines


def _figures(chosen: Sequence[CodecFigures]) -> str:
    ratios = [f.ratio for f in chosen]
    spans = f"{min(ratios):.2f} {median(ratios):.2f} {max(ratios):.2f}"
    encoding, decoding = (
        median(f.encode_rate for f in chosen) / 1e9,
        median(f.decode_rate for f in chosen) / 1e9,
    )
    pays = [8 * pays_below(f) / 1e9 for f in chosen]
    return f"{spans} | {encoding:.2f} / {decoding:.2f} | {min(pays):.1f} {median(pays):.1f} {max(pays):.1f}"


def verdict(rows: Sequence[CutRow]) -> Iterator[str]:
    """Yield a line for each goal, and one for each cut that misses it."""
    goals = [(f"dense {dtype}", DENSE_GOALS[dtype], ("dense", dtype)) for dtype in DTYPES]
    for title, goal, wanted in goals:
        yield from _goal(title, goal, [row for row in rows if (row.group, row.dtype) == wanted])
    yield from _goal(f"{SPARSE:.0%} zeros and more", SPARSE_GOAL, [r for r in rows if r.group == "sparse"])


def _goal(title: str, goal: float, rows: Sequence[CutRow]) -> Iterator[str]:
    if not rows:
        return
    ratios = [row.best.ratio for row in rows]
    reached = sum(ratio >= goal for ratio in ratios)
    yield f"{title}: {min(ratios):.2f}x to {max(ratios):.2f}x; {reached} of {len(rows)} cuts reach {goal}x"
    for row in rows:
        if row.best.ratio < goal:
            yield f"  below: {row.model} {row.cut} ({row.name}), {row.nbytes} bytes, {row.best.ratio:.3f}x"


def cut_lines(rows: Sequence[CutRow]) -> list[str]:
    """Return a line for each row, with all exact codecs, for a person."""
    lines = [f"{'model':<12}{'cut':>4} {'zeros':>6}  {'type':<9}" + "".join(f"{name:^31}" for name in EXACT)]
    lines.append(f"{'':<34}" + f"{'ratio':>8}{'GB/s':>12}{'pays below':>11}" * len(EXACT))
    for row in rows:
        line = f"{row.model:<12}{row.cut:>4} {row.zeros:>6.1%}  {row.dtype:<9}"
        for f in row.figures:
            speeds = f"{f.encode_rate / 1e9:.2f}/{f.decode_rate / 1e9:.2f}"
            line += f"{f.ratio:>7.2f}x{speeds:>12}{8 * pays_below(f) / 1e9:>11.1f}"
        lines.append(line)
    return lines


def accuracy_table(records: Iterable[Record]) -> list[str]:
    """Return a table in Markdown: for each cut and codec the held-out accuracy, and its difference seed by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        if record["kind"] == "accuracy":
            found.setdefault((record["cut"], record["codec"]), {})[record["seed"]] = record["accuracy"]
    if not found:
        return []
    lines = [
        "| cut | codec | seeds | held-out accuracy | deviation, points | beside raw, points |",
        "|---|---|---|---|---|---|",
    ]
    for (cut, codec), by_seed in found.items():
        raw = found.get((cut, NONE), {})
        pairs = [100 * (value - raw[seed]) for seed, value in by_seed.items() if seed in raw]
        difference = (
            ""
            if codec == NONE or not pairs
            else f"{mean(pairs):+.2f}, {min(pairs):+.2f} to {max(pairs):+.2f}"
        )
        values = [100 * value for value in by_seed.values()]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else ""
        lines.append(f"| {cut} | {codec} | {len(values)} | {mean(values):.2f} % | {spread} | {difference} |")
    return lines
