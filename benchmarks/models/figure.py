"""Figures of the benchmark ``models``: a page for each of DStore's Figures 4 to 9."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.models.rows import Row, page_rows
from benchmarks.models.settings import COLD, FIGURES, HAPI, ON_DEMAND, STORE, WAYS, Page, way_of
from benchmarks.models.shapes import WHOLE
from hapi.errors import UsageError
from hapi.figures.canvas import COLOURS, canvas, save
from hapi.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_WIDTH, _ROW_HEIGHT = 3.4, 0.24
_LABEL_WIDTH, _HEAD_HEIGHT, _TITLE_HEIGHT = 1.5, 0.4, 0.7


def draw(rows: Sequence[Row], path: str) -> None:
    """Write a page for each figure of which something was measured.

    Args:
        rows: of one file.
        path: the file's name, in which the figure's number is put before the suffix; kept as it is for one page.

    Raises:
        UsageError: nothing was measured, or a file cannot be written.
    """
    pages = [(page, found) for page in FIGURES if (found := page_rows(rows, page))]
    if not pages:
        raise UsageError(f"--figure {path}: nothing was measured yet")
    for page, found in pages:
        place = Path(path)
        draw_page(
            page, found, path if len(pages) == 1 else str(place.with_stem(f"{place.stem}-{page.number}"))
        )


def draw_page(page: Page, rows: Sequence[Row], path: str) -> None:
    """Write the page of one figure: a panel for each model and state of the files."""
    down = list(dict.fromkeys((row.cell.place, row.cell.pages) for row in rows if row.cell.part != STORE))
    across = list(dict.fromkeys(row.cell.shape for row in rows))
    by_line = [[row for row in rows if _belongs(row, place, pages)] for place, pages in down]
    ways = [[way.name for way in WAYS if any(row.cell.way == way.name for row in mine)] for mine in by_line]
    heights = [_HEAD_HEIGHT + _ROW_HEIGHT * len(shown) for shown in ways]
    with canvas(_LABEL_WIDTH + _PANEL_WIDTH * len(across), _TITLE_HEIGHT + sum(heights)) as figure:
        several = len(page.clients) > 1
        marked = "clients" if several else "percent of the bytes"
        figure.suptitle(
            f"DStore's Figure {page.number}: {page.title}\n"
            f"seconds of a load (circles, with {marked}) and of a store with fsync (squares)",
            fontsize=9.0, x=0.01, ha="left", color=COLOURS["ink"],
        )  # fmt: skip
        panels = figure.subplots(
            len(down), len(across), squeeze=False, sharex=True, sharey="row", height_ratios=heights
        )
        for line, (place, pages) in enumerate(down):
            for column, shape in enumerate(across):
                mine = [row for row in by_line[line] if row.cell.shape == shape]
                _panel(panels[line][column], mine, ways[line], several=several)
                panels[line][column].set_title(f"{shape}, {place}, {pages}")
        save(figure, path)


def _belongs(row: Row, place: str, pages: str) -> bool:
    """Whether a row is shown among the loads of a place and state; stores stand beside the warm ones."""
    return row.cell.place == place and (pages != COLD if row.cell.part == STORE else row.cell.pages == pages)


def _panel(axes: Axes, rows: Sequence[Row], ways: Sequence[str], *, several: bool) -> None:
    """Seconds of each way: a mark for each part, or for each number of clients."""
    from matplotlib.ticker import NullFormatter

    for row in rows:
        stored = row.cell.part == STORE
        ours = row.cell.way in (HAPI, ON_DEMAND)
        colour = COLOURS["stall"] if stored else COLOURS["chosen" if ours else "server"]
        place = ways.index(row.cell.way) + (0.0 if stored else 0.12)
        axes.plot(
            row.seconds, place, marker="s" if stored else "o", color=colour, markersize=4.0, linestyle="none",
            fillstyle="full" if stored or row.cell.part == WHOLE else "none", zorder=1 if stored else 2,
        )  # fmt: skip
        if several or not stored:
            text = str(row.cell.clients) if several else row.cell.part.removesuffix("%").replace("%", "")
            axes.annotate(
                text,
                (row.seconds, place),
                xytext=(0, 3),
                textcoords="offset points",
                fontsize=5.5,
                ha="center",
            )
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.set_yticks(range(len(ways)), [way_of(way).title for way in ways])
    axes.set_ylim(len(ways) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    axes.grid(axis="x", visible=True)
    axes.xaxis.set_major_formatter(lambda value, _: format_duration(value) if value > 0 else "0")
    axes.xaxis.set_minor_formatter(NullFormatter())
