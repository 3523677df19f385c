"""Figure of the benchmark ``offload``: samples a second of each way, group by group (LoHan, Figures 5, 7 and 10)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.offload.rows import OffloadRow
from benchmarks.offload.settings import ACTIVE, WAYS
from hapi.errors import UsageError
from hapi.figures.canvas import COLOURS, canvas, save

_WIDTH, _BAR, _HEAD = 7.6, 0.24, 0.7
"""Inches: of the figure, and the height of a bar and of a panel without bars."""


def draw(rows: Sequence[OffloadRow], path: str) -> None:
    """Write a figure with a panel for each group.

    Args:
        rows: of one measurement.
        path: a file with a figure's suffix.

    Raises:
        UsageError: there is no row, or the file cannot be written.
    """
    if not rows:
        raise UsageError(f"--figure {path}: nothing was measured yet")
    groups = list(dict.fromkeys(row.group for row in rows))
    heights = [_HEAD + _BAR * sum(row.group == group for row in rows) for group in groups]
    with canvas(_WIDTH, sum(heights)) as figure:
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, group in zip(panels, groups, strict=True):
            mine = [row for row in rows if row.group == group]
            for place, row in enumerate(mine):
                colour = COLOURS["chosen"] if row.way == ACTIVE else COLOURS["server"]
                axes.barh(place, row.samples_per_second, height=0.7, color=colour)
                axes.annotate(
                    f"{row.samples_per_second:.1f}", (row.samples_per_second, place), xytext=(3, 0),
                    textcoords="offset points", va="center", fontsize=7.5,
                )  # fmt: skip
            axes.set_yticks(range(len(mine)), [WAYS[row.way] for row in mine])
            axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.grid(axis="x", visible=True)
            axes.set_xlim(0, 1.15 * max(row.samples_per_second for row in mine))
            axes.set_title(f"{group}: samples a second, batch of {mine[0].rows}")
        save(figure, path)
