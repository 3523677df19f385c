"""Figures of a sweep, one for each view. Drawn with matplotlib, without a display."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.split import paper
from benchmarks.split.study import ORDER, Measured, optimality
from hapi.figures.canvas import canvas, check_suffix, save
from hapi.units import format_bandwidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE: Mapping[str, str] = {
    "auto": "#b4236b", "hapi": "#3b6fb5", "nsg": "#e08a1e", "bandwidth": "#8a63b3", "min": "#2f8f5b",
    "freeze": "#5c6675", "none": "#a9adb5",
}  # fmt: skip
"""A strategy's colour in every figure."""
_BINS = ("optimal", "within 5%", "within 10%", "within 15%", "beyond", "out of memory")
_BIN_COLOURS = ("#1a7f4b", "#74b88a", "#e9c46a", "#e08a1e", "#b5443b", "#4a2a2a")

Panel = Callable[["Axes", Sequence[Measured]], None]


def draw(view: str, cells: Sequence[Measured], path: str) -> None:
    """Write the figure of ``view`` (a key of :data:`PANELS`); :class:`UsageError` for a suffix that is none."""
    check_suffix(path)
    panel = PANELS[view]
    with canvas(max(7.0, 2.5 + 0.28 * len(cells)) if panel in _BY_CELL else 7.0, 4.2) as figure:
        panel(figure.subplots(), cells)
        save(figure, path)


def _optimality(axes: Axes, cells: Sequence[Measured]) -> None:
    """Ours on the left of each pair, the paper's (Table 3) on the right."""
    position = 0.0
    ticks: list[tuple[float, str]] = []
    for strategy in ORDER:
        found = optimality(cells, strategy)
        bars = [(f"{strategy}\nhere", [100 * count / found.cells for count in found.counts])]
        if strategy in paper.OPTIMALITY:
            bars.append(("paper", list(paper.OPTIMALITY[strategy])))
        for name, shares in bars:
            base = 0.0
            for number, (share, colour) in enumerate(zip(shares, _BIN_COLOURS, strict=True)):
                label = _BINS[number] if not ticks else None
                axes.bar(position, share, bottom=base, color=colour, width=0.8, label=label)
                base += share
            ticks.append((position, name))
            position += 1.0
        position += 0.5
    axes.set_xticks([t[0] for t in ticks], [t[1] for t in ticks], fontsize=7.5)
    axes.set_ylabel("% of cells")
    axes.set_title("How good the chosen splits are (Table 3)")
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _estimates(axes: Axes, cells: Sequence[Measured]) -> None:
    for form, colour, name in (
        ("sum", PALETTE["nsg"], "Neurosurgeon's sum"),
        ("paper", PALETTE["hapi"], "paper's form"),
        ("auto", PALETTE["auto"], "streamed form (auto)"),
    ):
        pairs = [
            (one.seconds(split) or 0.0, one.estimates[form][split]) for one in cells for split in one.times
        ]
        axes.scatter([p[0] for p in pairs], [p[1] for p in pairs], s=9, color=colour, alpha=0.6, label=name)
    measured = [one.seconds(split) or 0.0 for one in cells for split in one.times]
    ends = [min(measured) * 0.9, max(measured) * 1.1]
    axes.plot(ends, ends, color=PALETTE["freeze"], linewidth=0.8)
    axes.set(xlabel="measured epoch, s", ylabel="estimated epoch, s")
    _logarithmic(axes, "xy")
    axes.set_title("Estimated against measured epochs, all splits (Figure 11)")
    axes.legend(loc="upper left")


def _competitors(axes: Axes, cells: Sequence[Measured]) -> None:
    others = [name for name in ORDER if name != "auto"]
    width = 0.8 / len(others)
    ordered = _ordered(cells)
    for number, name in enumerate(others):
        heights = []
        for one in ordered:
            auto, split = one.choices["auto"], one.choices[name]
            ours = one.seconds(auto) or one.bounds.get(auto, one.best)
            heights.append((one.seconds(split) or one.bounds.get(split, 0.0)) / ours)
        positions = [i + (number - len(others) / 2 + 0.5) * width for i in range(len(ordered))]
        axes.bar(positions, heights, width=width, color=PALETTE[name], label=name)
    axes.axhline(1.0, color=PALETTE["auto"], linewidth=1.2, label="auto")
    _by_cell(
        axes,
        ordered,
        "epoch over auto's",
        "auto's speed-up (Figures 7 to 10); broken-off splits at their bound",
        columns=7,
    )


def _splits(axes: Axes, cells: Sequence[Measured]) -> None:
    """Figure 3: each cell's range over all measured splits, normalised to the freeze's epoch or its bound."""
    ordered = _ordered(cells)
    for position, one in enumerate(ordered):
        freeze = _freeze_seconds(one)
        medians = [statistics.median(times) / freeze for times in one.times.values()]
        bounds = [bound / freeze for bound in one.bounds.values()]
        axes.plot(
            [position, position], [min(medians), max(medians + bounds)], color=PALETTE["none"], linewidth=3
        )
    for name, mark, size in (("none", "s", 7), ("min", "o", 6), ("auto", "D", 4)):
        known = [(position, one, one.seconds(one.choices[name])) for position, one in enumerate(ordered)]
        points = [(position, s / _freeze_seconds(one)) for position, one, s in known if s is not None]
        colour = PALETTE[name] if name != "none" else PALETTE["freeze"]
        axes.plot(
            [p[0] for p in points], [p[1] for p in points], mark, color=colour, markersize=size, label=name
        )
    axes.axhline(1.0, color=PALETTE["freeze"], linewidth=0.8)
    _logarithmic(axes, "y")
    _by_cell(
        axes,
        ordered,
        "epoch over the freeze split's",
        "All static splits (Figure 3); lines end at least there",
        columns=3,
    )


def _bandwidth(axes: Axes, cells: Sequence[Measured]) -> None:
    groups: dict[tuple[str, int], list[Measured]] = {}
    for one in cells:
        groups.setdefault((one.cell.model, one.cell.bs), []).append(one)
    for (model, bs), found in sorted(groups.items()):
        line = sorted((one.cell.bandwidth / 1e6, one.choices["auto"]) for one in found)
        axes.plot([p[0] for p in line], [p[1] for p in line], "o-", markersize=4, label=f"{model}, {bs}")
    axes.set(xlabel="bandwidth, Mbit/s", ylabel="split that auto chose")
    _logarithmic(axes, "x")
    axes.set_title("The chosen split by bandwidth (Figure 13)")
    axes.legend(fontsize=6.0, ncols=2)


def _traffic(axes: Axes, cells: Sequence[Measured]) -> None:
    width = 0.8 / len(ORDER)
    ordered = _ordered(cells)
    for number, name in enumerate(ORDER):
        heights = [
            one.bytes_received.get(one.choices[name], one.wire[one.choices[name]]) / 2**20 for one in ordered
        ]
        positions = [i + (number - len(ORDER) / 2 + 0.5) * width for i in range(len(ordered))]
        axes.bar(positions, heights, width=width, color=PALETTE[name], label=name)
    _logarithmic(axes, "y")
    _by_cell(
        axes, ordered, "MiB of an epoch", "Bytes over the wire (earlier text, Figures 10b and 12)", columns=7
    )


def _cpu_client(axes: Axes, cells: Sequence[Measured]) -> None:
    ordered = _ordered(cells)
    forms = (("images", PALETTE["none"]), ("uint8", PALETTE["nsg"]), ("float32", PALETTE["hapi"]))
    for number, (form, colour) in enumerate(forms):
        heights = []
        for one in ordered:
            none = one.seconds(0) if form == "images" else one.tensors.get(form)
            auto = one.seconds(one.choices["auto"])
            heights.append(none / auto if none and auto else 0.0)
        positions = [i + (number - 1) * 0.27 for i in range(len(ordered))]
        axes.bar(positions, heights, width=0.27, color=colour, label=f"stored as {form}")
    axes.axhline(1.0, color=PALETTE["auto"], linewidth=1.2)
    _by_cell(
        axes,
        ordered,
        "NoSplit's epoch over auto's",
        "Speed-up on a client without a GPU (earlier text, Figure 9b)",
        columns=3,
    )


def _freeze_seconds(one: Measured) -> float:
    split = one.choices["freeze"]
    return one.seconds(split) or one.bounds.get(split, one.best)


def _logarithmic(axes: Axes, which: str) -> None:
    """Logarithmic axes with plain numbers: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullLocator

    for name in which:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axes.set(**{f"{name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")


def _ordered(cells: Sequence[Measured]) -> list[Measured]:
    return sorted(cells, key=lambda one: (one.cell.model, one.cell.bs, one.cell.bandwidth))


def _by_cell(axes: Axes, ordered: Sequence[Measured], label: str, title: str, *, columns: int) -> None:
    """A panel over all cells: their names below, the ``label`` beside, the ``title`` and a legend."""
    names = [f"{one.cell.model} {one.cell.bs}\n{format_bandwidth(one.cell.bandwidth)}" for one in ordered]
    axes.set_xticks(range(len(ordered)), names, rotation=90, fontsize=6.5)
    axes.set_xlim(-0.6, len(ordered) - 0.4)
    axes.margins(y=0.15)
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.legend(ncols=columns, loc="upper right")


PANELS: Mapping[str, Panel] = {
    "optimality": _optimality,
    "estimates": _estimates,
    "competitors": _competitors,
    "splits": _splits,
    "bandwidth": _bandwidth,
    "traffic": _traffic,
    "cpu-client": _cpu_client,
}
"""Quantity that is drawn for each view."""
_BY_CELL = (_competitors, _splits, _traffic, _cpu_client)
"""Figures as wide as there are cells."""
