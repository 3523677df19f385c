"""Figure of the benchmark ``epochs``: what an epoch and a whole job take by each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.epochs.rows import Row
from benchmarks.epochs.settings import WAYS, way_of
from hapi.errors import UsageError
from hapi.figures.canvas import COLOURS, canvas, save
from hapi.units import format_bandwidth, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 8.2, 2.9
_ROOM = 1.22
"""Width of a panel over its longest bar, for the figures beside it."""


def draw(rows: Sequence[Row], path: str, what: str) -> None:
    """Write the figure of the last cell of ``rows`` at its largest number of epochs.

    Args:
        rows: of one measurement.
        path: a file with a figure's suffix.
        what: the cell's job, for the title.

    Raises:
        UsageError: there is no row, or the file cannot be written.
    """
    if not rows:
        raise UsageError(f"--figure {path}: nothing was measured yet")
    cell = rows[-1].cell
    count = max(row.epochs for row in rows if row.cell == cell)
    order = [way.name for way in WAYS]
    shown = sorted(
        (row for row in rows if (row.cell, row.epochs) == (cell, count)), key=lambda row: order.index(row.way)
    )
    with canvas(_WIDTH, _HEIGHT) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        figure.suptitle(
            f"{what}; link of {format_bandwidth(shown[0].bandwidth)}",
            fontsize=9.0, x=0.01, ha="left", color=COLOURS["ink"],
        )  # fmt: skip
        _epochs(left, shown)
        _jobs(right, shown, count)
        save(figure, path)


def _epochs(axes: Axes, rows: Sequence[Row]) -> None:
    """Epoch 0 and a later one, one above the other."""
    for place, row in enumerate(rows):
        _bar(axes, place - 0.2, row.first_seconds, COLOURS["stall"], "epoch 0" if place == 0 else None)
        if row.later_seconds is not None:
            colour = COLOURS["chosen"] if row.way == "hapi" else COLOURS["server"]
            _bar(axes, place + 0.2, row.later_seconds, colour, "each later epoch" if place == 0 else None)
    axes.set_yticks(range(len(rows)), [way_of(row.way).title for row in rows])
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    axes.invert_yaxis()
    longest = max(max(row.first_seconds, row.later_seconds or 0.0) for row in rows)
    _finish(axes, longest, "seconds of an epoch")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.1), ncols=2)


def _jobs(axes: Axes, rows: Sequence[Row], count: int) -> None:
    """The whole job."""
    for place, row in enumerate(rows):
        colour = COLOURS["chosen"] if row.way == "hapi" else COLOURS["server"]
        _bar(axes, place, row.seconds, colour, None, height=0.62)
    computed = any(row.computed for row in rows)
    title = f"a job of {count} epochs" + (" (computed)" if computed else "")
    _finish(axes, max(row.seconds for row in rows), title)


def _bar(
    axes: Axes, place: float, seconds: float, colour: str, label: str | None, height: float = 0.36
) -> None:
    axes.barh(place, seconds, height=height, color=colour, label=label)
    axes.annotate(
        f"{seconds:.1f} s" if seconds < 100 else format_duration(seconds),
        (seconds, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5,
    )  # fmt: skip


def _finish(axes: Axes, longest: float, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, longest * _ROOM)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: format_duration(value) if value > 0 else "0")
