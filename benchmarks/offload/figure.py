"""Pages of the benchmark ``offload``: one for each of LoHan's Figures 5 to 10, with the paper's figures below ours."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.offload.paper import Comparison
from benchmarks.offload.rows import OffloadRow
from benchmarks.offload.settings import (
    ACTIVE,
    CHECKPOINTED,
    KEPT,
    MEMORY,
    NAIVE,
    RECOMPUTE,
    SAVED,
    SERIAL,
    SHARES,
    SIZE_ROWS,
    SWAP,
    WAYS,
)
from hapi.errors import UsageError
from hapi.figures.canvas import COLOURS, canvas, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_WIDTH, _PANEL_HEIGHT, _BAR, _HEAD, _LINE = 3.6, 2.5, 0.24, 0.7, 0.17
"""Inches: of a panel, the height of a bar, of a panel without bars, and of a line of text."""
_LETTERS = 56
"""Letters of a line below the figure, for each panel."""
_LOOKS: Mapping[str, tuple[str, str]] = {
    ACTIVE: (COLOURS["chosen"], "o"),
    MEMORY: (COLOURS["server"], "s"),
    SERIAL: (COLOURS["network"], "^"),
    NAIVE: (COLOURS["client"], "v"),
    SAVED: (COLOURS["stall"], "D"),
    CHECKPOINTED: (COLOURS["muted"], "x"),
    KEPT: (COLOURS["network"], "s"),
}
Points = Mapping[str, Sequence[tuple[float, float]]]
"""Places of each way's marks."""


@dataclass(frozen=True)
class Panel:
    """One panel: its title, the words below it, and what draws it."""

    title: str
    below: str
    fill: Callable[[Axes], None]
    height: float = _PANEL_HEIGHT


@dataclass(frozen=True)
class Page:
    """One of the paper's figures."""

    number: str
    title: str
    panels: Callable[[Sequence[OffloadRow], Sequence[Mapping[str, Any]]], list[Panel]]
    is_tall: bool = False
    """Panels stand one above the other."""


def draw(
    rows: Sequence[OffloadRow],
    sizes: Sequence[Mapping[str, Any]],
    compared: Sequence[Comparison],
    path: str,
) -> None:
    """Write a page for each of the paper's figures of which something was measured.

    Args:
        rows: of one measurement.
        sizes: largest tails of the same.
        compared: the paper's figures beside ours.
        path: the file's name, in which the figure's number is put before the suffix; kept as it is for one page.

    Raises:
        UsageError: nothing was measured, or a file cannot be written.
    """
    pages = [(page, panels) for page in PAGES if (panels := page.panels(rows, sizes))]
    if not pages:
        raise UsageError(f"--figure {path}: nothing was measured yet")
    place = Path(path)
    for page, panels in pages:
        mine = [one for one in compared if one.figure.startswith(page.number)]
        _draw_page(
            page,
            panels,
            mine,
            path if len(pages) == 1 else str(place.with_stem(f"{place.stem}-{page.number}")),
        )


def _draw_page(page: Page, panels: Sequence[Panel], compared: Sequence[Comparison], path: str) -> None:
    across = 1 if page.is_tall else len(panels)
    wide = 2 if page.is_tall else max(2, across)
    notes = [
        line
        for one in compared
        for line in textwrap.wrap(one.text(), wide * _LETTERS, subsequent_indent="    ")
    ]
    heights = [panel.height for panel in panels] if page.is_tall else [panels[0].height]
    with canvas(_PANEL_WIDTH * wide, sum(heights) + _LINE * (len(notes) + 3)) as figure:
        figure.suptitle(
            f"LoHan's Figure {page.number}: {page.title}",
            fontsize=9.0,
            x=0.01,
            ha="left",
            color=COLOURS["ink"],
        )
        grid = figure.subplots(len(heights), across, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel.fill(axes)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.below)
        if notes:
            figure.supxlabel("\n".join(notes), fontsize=7.5, x=0.01, ha="left", color=COLOURS["muted"])
        save(figure, path)


def _lines(points: Points) -> Callable[[Axes], None]:
    """Lines over the horizontal axis, one for each way, from 0 on."""

    def fill(axes: Axes) -> None:
        for way, places in points.items():
            colour, mark = _LOOKS[way]
            axes.plot(
                *zip(*sorted(places), strict=True), color=colour, marker=mark, markersize=4, label=WAYS[way]
            )
        axes.set_ylim(0, 1.35 * max(y for places in points.values() for _, y in places))
        axes.set_xlim(left=0)
        axes.legend(loc="upper left", fontsize=6.5, ncols=2)

    return fill


def _points(
    rows: Sequence[OffloadRow], x: Callable[[OffloadRow], float], y: Callable[[OffloadRow], float]
) -> Points:
    return {
        way: [(x(row), y(row)) for row in rows if row.way == way]
        for way in dict.fromkeys(r.way for r in rows)
    }


def _throughput(rows: Sequence[OffloadRow], _: Sequence[Mapping[str, Any]]) -> list[Panel]:
    mine = _of_part(rows, "steps")
    panels = []
    for count in dict.fromkeys(row.parameters for row in mine):
        tail = [row for row in mine if row.parameters == count]
        fill = _lines(_points(tail, lambda row: row.rows, lambda row: row.samples_per_second))
        panels.append(Panel(f"samples/s, {count / 1e6:.0f} M parameters", "rows of a batch", fill))
    if len(panels) > 1:
        fastest = [
            max((r for r in mine if (r.way, r.parameters) == key), key=_flops)
            for key in dict.fromkeys((r.way, r.parameters) for r in mine)
        ]
        panels.append(
            Panel(
                "GFLOP/s, fastest batch",
                "millions of parameters",
                _lines(_points(fastest, lambda row: row.parameters / 1e6, _flops)),
            )
        )
    return panels


def _flops(row: OffloadRow) -> float:
    """Billions of operations a second: six for each parameter and row."""
    return 6 * row.parameters * row.samples_per_second / 1e9


def _bars(rows: Sequence[OffloadRow], _: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Ways that update during backward beside those that do after it, of whatever batch."""
    groups = dict.fromkeys(
        row.group for row in rows if row.way in (NAIVE, SERIAL) and not _of_part([row], "disks")
    )
    panels = []
    for group in groups:
        mine = [row for row in rows if row.group == group]
        title = f"{group}: samples/s, batch of {mine[0].rows}"
        panels.append(Panel(title, "", _bars_of(mine), _HEAD + _BAR * len(mine)))
    return panels


def _bars_of(rows: Sequence[OffloadRow]) -> Callable[[Axes], None]:
    def fill(axes: Axes) -> None:
        for place, row in enumerate(rows):
            colour = COLOURS["chosen"] if row.way == ACTIVE else COLOURS["server"]
            axes.barh(place, row.samples_per_second, height=0.7, color=colour)
            axes.annotate(
                f"{row.samples_per_second:.1f}", (row.samples_per_second, place), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7.5,
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [WAYS[row.way] for row in rows])
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.set_xlim(0, 1.15 * max(row.samples_per_second for row in rows))

    return fill


def _largest(sizes: Sequence[Mapping[str, Any]], ways: Sequence[str], over: str, scale: float) -> Points:
    found = {
        way: [(s[over] / scale, s["parameters"] / 1e6) for s in sizes if s["way"] == way] for way in ways
    }
    return {way: places for way, places in found.items() if places}


def _over_caps(_: Sequence[OffloadRow], sizes: Sequence[Mapping[str, Any]]) -> list[Panel]:
    points = _largest([s for s in sizes if s["rows"] == SIZE_ROWS], (MEMORY, ACTIVE), "cap", 1e9)
    title = f"largest tail, batch of {SIZE_ROWS}: millions of parameters"
    return [Panel(title, "GB of memory (the cap)", _lines(points))] if points else []


def _over_batches(_: Sequence[OffloadRow], sizes: Sequence[Mapping[str, Any]]) -> list[Panel]:
    caps = {s["cap"] for s in sizes if s["way"] == KEPT}
    panels = []
    for cap in sorted(caps):
        points = _largest([s for s in sizes if s["cap"] == cap], (KEPT, ACTIVE), "rows", 1)
        panels.append(
            Panel(
                f"largest tail in {cap / 1e9:g} GB: millions of parameters", "rows of a batch", _lines(points)
            )
        )
    return panels


def _curves(rows: Sequence[OffloadRow], _: Sequence[Mapping[str, Any]]) -> list[Panel]:
    mine = _of_part(rows, "swap")
    panels = []
    for group in dict.fromkeys(row.group for row in mine):
        one = [row for row in mine if row.group == group]
        panels.append(
            Panel(f"seconds of a step, batch of {one[0].rows}", "MB of activations swapped", _curve(one))
        )
    return panels


def _curve(rows: Sequence[OffloadRow]) -> Callable[[Axes], None]:
    """Forced amounts as a line, and the planned one as a star."""

    def fill(axes: Axes) -> None:
        line = sorted(
            (row.swapped / 1e6, row.seconds) for row in rows if row.way in (RECOMPUTE, *SHARES, SWAP)
        )
        axes.plot(*zip(*line, strict=True), color=COLOURS["server"], marker="o", markersize=4, label="forced")
        for row in rows:
            if row.way == ACTIVE:
                axes.plot(row.swapped / 1e6, row.seconds, color=COLOURS["chosen"], marker="*", markersize=11,
                          linestyle="none", label="planned")  # fmt: skip
        axes.set_ylim(0, 1.35 * max(row.seconds for row in rows))
        axes.legend(loc="upper left", fontsize=6.5, ncols=2)

    return fill


def _over_drives(rows: Sequence[OffloadRow], _: Sequence[Mapping[str, Any]]) -> list[Panel]:
    mine = _of_part(rows, "disks")
    points = _points(mine, lambda row: row.drives, lambda row: row.samples_per_second)
    title = f"samples/s, {mine[0].parameters / 1e6:.0f} M parameters" if mine else ""
    return [Panel(title, "throttled folders, which stand for drives", _lines(points))] if points else []


def _of_part(rows: Sequence[OffloadRow], part: str) -> list[OffloadRow]:
    return [row for row in rows if row.group.startswith(f"{part}/")]


PAGES = (
    Page("5", "throughput over batches and sizes", _throughput),
    Page("6", "largest model over main memory", _over_caps),
    Page("7", "active gradient offloading", _bars, is_tall=True),
    Page("8", "activations on the disk, too", _over_batches),
    Page("9", "time over the amount of swapped activations", _curves),
    Page("10", "number of disks", _over_drives),
)
"""All, in the paper's order."""
