"""LoHan's own figures as its text gives them, and ours of the same kind beside them.

Its machine has a GPU of 24 GB beside 128 to 768 GB of main memory, ours trains on a CPU, whose memory is all that
there is. So ratios are compared and no seconds. Where a way of ours is not the paper's, ``ours_is`` says what it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.offload.rows import OffloadRow, Records, pairs, sizes_of
from benchmarks.offload.settings import (
    ACTIVE,
    CHECKPOINTED,
    GOALS,
    KEPT,
    MEMORY,
    NAIVE,
    RECOMPUTE,
    SERIAL,
    SHARES,
    SIZE_ROWS,
    SWAP,
)

BYTES_A_PARAMETER = "bytes of memory for each parameter"
_SAVING = (RECOMPUTE, *SHARES, SWAP)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One of the paper's figures and ours."""

    figure: str
    """Number of the paper's figure."""
    what: str
    """The paper's figure in words, with the section that says it."""
    paper: tuple[float, float]
    """Lowest and highest value in the text; equal where it gives one."""
    ours_is: str
    ours: tuple[float, float]
    """Lowest and highest of our groups."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def text(self) -> str:
        """Return it in a line for a person."""
        theirs, mine = _span(self.paper), _span(self.ours)
        return f"Figure {self.figure}: {self.what}: {theirs}; here {mine}: {self.ours_is}"


def compare(records: Records, rows: Sequence[OffloadRow]) -> list[Comparison]:
    """Return the paper's figures for which something of ours was measured."""
    found = []
    for figure, what, paper, ours_is, ours in _lines(records, rows):
        values = list(ours)
        if values:
            span = (min(values), max(values))
            found.append(Comparison(figure=figure, what=what, paper=paper, ours_is=ours_is, ours=span))
    return found


_Line = tuple[str, str, tuple[float, float], str, Iterator[float]]


def _lines(records: Records, rows: Sequence[OffloadRow]) -> list[_Line]:
    def over(other: str, *parts: str) -> Iterator[float]:
        return _speeds(records, rows, other, parts)

    return [
        (
            "5a, 5b", "tokens/s over ZeRO-Infinity, 13B (section V-C)", (2.48, 3.46),
            "samples/s over states on the disk that are updated after backward", over(SERIAL, "steps"),
        ),
        (
            "5a, 5b", "tokens/s over ZeRO-Offload, 13B (section V-C)", (1.57, 2.32),
            "samples/s over AdamW in memory with full recompute", over(CHECKPOINTED, "steps"),
        ),
        (
            "5c", "FLOPS over their peak, 13B to 175B (section V-C)", (0.53, 0.95),
            "samples/s over AdamW in memory", over(MEMORY, "steps"),
        ),
        (
            "6", f"{BYTES_A_PARAMETER}: 276B in 768 GB, 175B in 256 GB (section V-B)", (256 / 175, 768 / 276),
            "the cap over the largest tail", _bytes_a_parameter(records, ACTIVE),
        ),
        (
            "6", "largest model over ZeRO-Infinity's, 768 GB (section V-B)", (2.04, 2.04),
            "largest tail over that of AdamW in memory", _larger(records, MEMORY),
        ),
        (
            "7", "tokens/s over LoHan+ZeRO, 13B, batch of 64 (section V-D)", (1.33, 1.33),
            "samples/s over serial", over(SERIAL, "steps", GOALS),
        ),
        (
            "7", "tokens/s over LoHan Naive, 13B, batch of 64 (section V-D)", (1.22, 1.22),
            "samples/s over naive", over(NAIVE, "steps", GOALS),
        ),
        (
            "8", "largest model over the one with activations in main memory, 128 GB (section V-E)", (2.0, 5.0),
            "largest tail over the one whose activations stay in memory", _larger(records, KEPT),
        ),
        (
            "9b", "the chosen amount's time over the best one's: 'nearly optimal' (section V-E)", (1.0, 1.0),
            "the planned step over the fastest of five forced amounts", _chosen_over_best(rows),
        ),
        (
            "10a", "three drives over one: 'near linear' (section V-F)", (3.0, 3.0),
            "samples/s with three throttled drives over one", _drives_over_one(rows, 3),
        ),
    ]  # fmt: skip


def _speeds(
    records: Records, rows: Sequence[OffloadRow], other: str, parts: Sequence[str]
) -> Iterator[float]:
    """Our samples a second over another way's, by pairs of turns; none where they were not measured side by side."""
    for group in dict.fromkeys(row.group for row in rows):
        ratios = pairs(records, group, other, ACTIVE)
        if ratios and group.split("/")[0] in parts:
            yield statistics.median(ratios)


def _sizes(records: Records, way: str) -> dict[tuple[float, int], Mapping[str, Any]]:
    return {
        (one["cap"], one["rows"]): one for one in sizes_of(records) if one["way"] == way and one["parameters"]
    }


def _bytes_a_parameter(records: Records, way: str) -> Iterator[float]:
    for (cap, rows), one in _sizes(records, way).items():
        if rows == SIZE_ROWS:
            yield cap / one["parameters"]


def _larger(records: Records, other: str) -> Iterator[float]:
    theirs = _sizes(records, other)
    for job, one in _sizes(records, ACTIVE).items():
        if job in theirs:
            yield one["parameters"] / theirs[job]["parameters"]


def _chosen_over_best(rows: Sequence[OffloadRow]) -> Iterator[float]:
    for row in rows:
        forced = [one for one in rows if one.group == row.group and one.way in _SAVING]
        # With one amount in all of them there was nothing to choose.
        if row.way == ACTIVE and len({one.swapped for one in forced}) > 1:
            yield row.seconds / min(one.seconds for one in forced)


def _drives_over_one(rows: Sequence[OffloadRow], count: int) -> Iterator[float]:
    found = {row.drives: row for row in rows if row.way == ACTIVE and row.group.startswith("disks/")}
    if 1 in found and count in found:
        yield found[count].samples_per_second / found[1].samples_per_second


def _span(values: tuple[float, float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    low, high = (form(value) for value in values)
    return low if low == high else f"{low} to {high}"
