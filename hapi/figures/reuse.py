"""The choice of what is kept: a table of its alternatives for a run's page, and lines over the number of epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hapi.figures.canvas import COLOURS, canvas, inline_svg, legend, seconds_axis
from hapi.figures.fields import Fields
from hapi.figures.markup import escaped, figure, section, table
from hapi.profiler.reuse.choice import MODE_NAMES
from hapi.profiler.reuse.over_epochs import Course
from hapi.text import counted
from hapi.units import format_bytes, format_duration, format_money

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES: Mapping[str, str] = {
    "recompute": "ink",
    "keep samples": "stall",
    "keep there": "server",
    "keep here": "client",
}
"""Colour of each mode: features have that of the side that keeps them."""


@dataclass(frozen=True, kw_only=True)
class ReuseCost:
    """Costs of the whole job by the best choice of one mode."""

    cut: int
    split: int
    later: int
    """Split once the cache is full."""
    codec: str
    seconds: float
    last: float | None
    """Seconds of the last epoch; None in older reports."""
    money: float
    received: int
    """Bytes."""
    on_disk: int
    """Bytes."""
    kept: float
    """Share of the samples that is kept at the end."""
    filled: float | None
    """Seconds until the cache is full; None if that is after the job's end."""

    @classmethod
    def of(cls, f: Fields) -> ReuseCost:
        """Parse the ``cost`` of a candidate."""
        choice = f.inner("choice")
        crossing = choice.inner("crossing") if choice.has("crossing") else choice  # of older reports
        split = crossing.integer("split")
        return cls(
            cut=choice.integer("cut"),
            split=split,
            later=choice.inner("later").integer("split") if choice.has("later") else split,
            codec=choice.inner("codec").text("name"),
            seconds=f.seconds("seconds"),
            last=f.seconds("last_epoch_seconds") if f.has("last_epoch_seconds") else None,
            money=f.seconds("money"),
            received=f.integer("received_bytes"),
            on_disk=f.integer("kept_bytes"),
            kept=f.seconds("kept"),
            filled=f.seconds("fill_seconds") if f.has("fill_seconds") else None,
        )


@dataclass(frozen=True, kw_only=True)
class ReuseOption:
    """One mode among the alternatives."""

    mode: str
    cost: ReuseCost | None
    """None where the mode is not possible."""
    rejected: str
    """Reason why it was not chosen; empty for the chosen one."""


@dataclass(frozen=True, kw_only=True)
class ReusePart:
    """The report's part about the choice of what is kept."""

    mode: str
    objective: str
    epochs: int
    """Epochs that the choice was made for."""
    reason: str
    priced: bool
    """True if anything had a price."""
    options: tuple[ReuseOption, ...]

    def cost_of(self, mode: str) -> ReuseCost | None:
        """Return the costs of ``mode``; None where it is not possible."""
        return next((option.cost for option in self.options if option.mode == mode), None)

    @classmethod
    def of(cls, f: Fields) -> ReusePart:
        """Parse ``plan.reuse``; :class:`ConfigError` names the first field that is wrong."""
        prices = f.inner("prices") if f.has("prices") else None
        return cls(
            mode=f.text("mode"),
            objective=f.text("objective"),
            epochs=f.integer("epochs"),
            reason=f.text("reason"),
            priced=prices is not None
            and any(prices.seconds(name) for name in ("egress", "server", "trainer")),
            options=tuple(
                ReuseOption(
                    mode=one.text("mode"),
                    cost=ReuseCost.of(one.inner("cost")) if one.has("cost") else None,
                    rejected=one.text("rejected"),
                )
                for one in f.objects("candidates")
            ),
        )


def mode_name(mode: str) -> str:
    """Return what is kept in ``mode``, for people."""
    return next((name for known, name in MODE_NAMES.items() if known == mode), mode)


def reuse_choice(reuse: ReusePart | None) -> str:
    """Return the part of the page; empty without a choice."""
    if reuse is None:
        return ""
    head: tuple[str, ...] = (
        "Kept",
        "Layer",
        "Split",
        "Codec",
        "Job",
        "Money",
        "Received",
        "On disk",
        "Share kept",
        "Filled",
        "",
    )
    rows = [_row(option) for option in reuse.options]
    if not reuse.priced:
        head, rows = (*head[:5], *head[6:]), [(*row[:5], *row[6:]) for row in rows]
    classes = [
        "chosen" if option.mode == reuse.mode else "unfit" if option.cost is None else ""
        for option in reuse.options
    ]
    jobs = counted(reuse.epochs, "epoch")
    aim = "least money" if reuse.objective == "money" else "least time"
    caption = f"The best choice of each kind for a job of {jobs}, by estimate; chosen for {aim}"
    alternatives = table(caption, head, rows, classes, {0, len(head) - 1}, {len(head) - 1})
    said = f"<p>Kept: {escaped(mode_name(reuse.mode))}. {escaped(reuse.reason)}.</p>"
    priced = " Money by the prices of the run." if reuse.priced else ""
    drawing = figure(modes_svg(reuse), f"Estimates for the whole job, by what is kept.{priced}")
    return section("The choice of what is kept", said + drawing + alternatives)


def modes_svg(reuse: ReusePart) -> str:
    """Return the seconds of each possible mode, and its money where anything has a price, as an ``<svg>`` element."""
    possible = [(option.mode, option.cost) for option in reuse.options if option.cost is not None]
    names = [mode_name(mode) for mode, _ in possible]
    colours = [COLOURS[_LINES.get(mode, "muted")] for mode, _ in possible]
    with canvas(9.0, 0.9 + 0.3 * len(possible)) as drawing:
        panels = drawing.subplots(1, 2 if reuse.priced else 1, squeeze=False)[0]
        for axes, what in zip(panels, ("seconds", "money"), strict=False):
            axes.barh(range(len(possible)), [getattr(cost, what) for _, cost in possible], 0.7, color=colours)
            axes.set_yticks(range(len(possible)), names)
            axes.invert_yaxis()
            axes.grid(True, axis="x")
            axes.grid(False, axis="y")
            axes.set_title("Seconds of the job" if what == "seconds" else "Its money")
            axes.xaxis.set_major_formatter(_duration if what == "seconds" else _plain)
        return inline_svg(drawing, "modes", f"Costs of the job by what is kept: {', '.join(names)}")


def _duration(value: float, _: object) -> str:
    return format_duration(value) if value > 0 else "0"


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _row(option: ReuseOption) -> tuple[str, ...]:
    cost, name = option.cost, mode_name(option.mode)
    if cost is None:
        return (name, *["–"] * 9, option.rejected)
    keeps = option.mode != "recompute"
    return (
        name,
        str(cost.cut) if cost.cut else "–",
        str(cost.split) if cost.later == cost.split else f"{cost.split}, then {cost.later}",
        cost.codec if keeps else "–",
        format_duration(cost.seconds),
        format_money(cost.money),
        format_bytes(cost.received),
        format_bytes(cost.on_disk) if keeps else "–",
        f"{cost.kept:.0%}" if keeps else "–",
        "–" if cost.filled is None or not keeps else format_duration(cost.filled),
        option.rejected or "chosen",
    )


def draw_courses(panels: Sequence[Axes], drawn: Sequence[Course], chosen: str) -> None:
    """Draw what jobs cost by their epochs, a line for each mode.

    Args:
        panels: of the seconds, and of the money where anything has a price.
        drawn: the costs of each mode.
        chosen: mode whose line is drawn thick.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    for axes, what in zip(panels, ("seconds", "money"), strict=False):
        for course in drawn:
            style: dict[str, Any] = {"marker": "o", "markersize": 3.5}
            style["linewidth"] = 2.4 if course.mode == chosen else 1.0
            values = getattr(course, what)
            axes.plot(
                course.epochs,
                values,
                color=COLOURS[_LINES[course.mode]],
                label=mode_name(course.mode),
                **style,
            )
        axes.set_title("Jobs by their epochs" if what == "seconds" else "Their money")
        axes.set_xlabel("epochs")
        if all(value > 0 for course in drawn for value in getattr(course, what)):
            axes.set_yscale("log")  # what is kept may save a hundredfold
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(_plain)
        legend(axes)
    seconds_axis(panels[0])
