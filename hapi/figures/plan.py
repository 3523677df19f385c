"""Figures of a plan: the layers' sizes and times, and the cost of each split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hapi.figures.canvas import (
    COLOURS,
    canvas,
    check_suffix,
    inline_svg,
    legend,
    name_ticks,
    save,
    seconds_axis,
)
from hapi.figures.reuse import draw_courses
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.over_epochs import Course
from hapi.profiler.strategies import Candidate, Plan
from hapi.units import format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CLIP = 5.0
"""Bars beyond this many times the chosen split's are cut off, so that those worth comparing stay apart."""


def plan_figure(
    plan: Plan,
    profile: Profile,
    job: Job,
    path: str,
    *,
    courses: Sequence[Course] = (),
    kept: str = "",
) -> None:
    """Write one figure of ``plan`` to a file.

    Args:
        plan: the chosen split and all candidates.
        profile: its measurements.
        job: the training that it was made for.
        path: file whose suffix chooses PNG, SVG or PDF.
        courses: costs of jobs by their epochs and by what they keep; none for a figure without them.
        kept: mode that was chosen among these.

    Raises:
        UsageError: the suffix is unknown, or the file cannot be written.
    """
    check_suffix(path, "--figure")
    priced = any(any(course.money) for course in courses)
    more = [2.6] * (2 if priced else 1) if courses else []
    with canvas(_width(profile), 10.5 + sum(more)) as figure:
        panels = figure.subplots(4 + len(more), 1, height_ratios=(3, 2.4, 2.4, 3.6, *more))
        _draw_layers(panels[:3], plan.split, profile)
        _draw_stages(panels[3], plan.candidates, plan.split, profile.freeze, job)
        if courses:
            draw_courses(panels[4:], courses, kept)
        figure.suptitle(
            f"{profile.model}: split {plan.split} chosen by {plan.strategy}, freeze {profile.freeze}, "
            f"training batch {job.bs}",
            fontsize=11.5,
        )
        save(figure, path, "--figure")


def layers_svg(profile: Profile, split: int) -> str:
    """Return the layer profile as an ``<svg>`` element (after Figure 2 of HAPI)."""
    with canvas(_width(profile), 6.6) as figure:
        _draw_layers(figure.subplots(3, 1, height_ratios=(3, 2.2, 2.2)), split, profile)
        title = (
            f"Layer profile of {profile.model}: output size, forward time and memory of its "
            f"{len(profile.layers)} layers; the split is {split}, the freeze {profile.freeze}"
        )
        return inline_svg(figure, "layers", title)


def stages_svg(candidates: Sequence[Candidate], split: int, profile: Profile, job: Job) -> str:
    """Return the stages of every split as an ``<svg>`` element.

    Args:
        candidates: estimates of all splits.
        split: the chosen one.
        profile: the measurements.
        job: the training.
    """
    with canvas(_width(profile), 4.2) as figure:
        _draw_stages(figure.subplots(), candidates, split, profile.freeze, job)
        title = (
            f"Seconds of server, network and client for splits 0 to {len(candidates) - 1}; chosen is {split}"
        )
        return inline_svg(figure, "stages", title)


def _width(profile: Profile) -> float:
    """Inches: as wide as a page, and wider for networks with many layers."""
    return max(9.0, min(18.0, 0.16 * len(profile.layers)))


def _draw_layers(panels: Any, split: int, profile: Profile) -> None:
    sizes, times, memory = panels
    positions = range(1, len(profile.layers) + 1)
    outputs = profile.output_bytes()
    sizes.bar(range(len(outputs)), outputs, 0.8, color=COLOURS["stall"], label="one sample")
    sizes.axhline(outputs[0], color=COLOURS["ink"], linewidth=1.2, label=f"input, {format_bytes(outputs[0])}")
    stored = profile.samples.stored_bytes
    sizes.axhline(
        stored,
        color=COLOURS["ink"],
        linewidth=1.2,
        linestyle="--",
        label=f"as stored, {format_bytes(stored)}",
    )
    sizes.set_title("Output of each layer")
    _bytes_axis(sizes)
    for offset, tier in ((-0.2, "server"), (0.2, "client")):
        seconds = [getattr(layer, f"{tier}_seconds") for layer in profile.layers]
        times.bar([x + offset for x in positions], seconds, 0.4, color=COLOURS[tier], label=f"on the {tier}")
    times.set_title("Forward pass of one sample")
    seconds_axis(times)
    working = [layer.working_bytes for layer in profile.layers]
    parameters = [layer.parameter_bytes for layer in profile.layers]
    memory.bar(
        [x - 0.2 for x in positions], working, 0.4, color=COLOURS["muted"], label="live tensors, one sample"
    )
    memory.bar([x + 0.2 for x in positions], parameters, 0.4, color=COLOURS["stall"], label="weights")
    memory.set_title("Memory of each layer")
    _bytes_axis(memory)
    names = ["input", *(layer.name for layer in profile.layers)]
    for panel in panels:
        name_ticks(panel, names)
        if panel is not memory:
            panel.tick_params(labelbottom=False)
        _mark(panel, split, profile.freeze)
        legend(panel, marks=panel is sizes)


def _draw_stages(axes: Axes, candidates: Sequence[Candidate], split: int, freeze: int, job: Job) -> None:
    batches = -(-job.samples // job.bs)
    per_batch = [c.estimate.epoch_seconds / batches for c in candidates]
    stages = [
        [getattr(c.estimate.stages, name) for c in candidates] for name in ("server", "network", "client")
    ]
    sums = [sum(seconds) for seconds in zip(*stages, strict=True)]
    top = _top(sums, per_batch, split)
    floor = [0.0] * len(candidates)
    positions = range(len(candidates))
    for name, seconds in zip(("server", "network", "client"), stages, strict=True):
        bars = axes.bar(positions, seconds, 0.78, bottom=floor, color=COLOURS[name])
        axes.bar([0], [0], color=COLOURS[name], label=name)  # for the legend, which shows no hatch
        for bar, candidate in zip(bars, candidates, strict=True):
            if not candidate.fits:
                bar.set_hatch("////")
        floor = [below + more for below, more in zip(floor, seconds, strict=True)]
    if not all(c.fits for c in candidates):
        axes.bar([0], [0], color=COLOURS["muted"], hatch="////", label="does not fit")
    axes.plot(
        positions, per_batch, color=COLOURS["ink"], marker="o", markersize=3.5, linewidth=1.0,
        label="overlapped (right: epoch)",
    )  # fmt: skip
    _cut_off(axes, sums, per_batch, top)
    axes.set_title("Batch at each split")
    name_ticks(axes, ["stored", *(c.name for c in candidates[1:])])
    seconds_axis(axes)
    right = axes.secondary_yaxis("right", functions=_scaled(batches))
    right.yaxis.set_major_formatter(lambda value, _: format_duration(value) if value > 0 else "0")
    right.set_ylabel("epoch")
    _mark(axes, split, freeze)
    legend(axes, marks=True)


def _scaled(factor: int) -> Any:
    """Functions from one axis to the other and back, as matplotlib takes them."""
    return (lambda y: y * factor, lambda y: y / factor)


def _top(sums: Sequence[float], per_batch: Sequence[float], split: int) -> float:
    """Upper end of the axis of seconds."""
    highest = max(max(sums), max(per_batch))
    chosen = max(sums[split], per_batch[split])
    return min(highest, _CLIP * chosen) if chosen > 0 else highest


def _cut_off(axes: Axes, sums: Sequence[float], per_batch: Sequence[float], top: float) -> None:
    """End the axis at ``top``, and say beside a bar that goes on how far."""
    if top <= 0:
        return
    axes.set_ylim(0, top * 1.08)
    for position, (seconds, line) in enumerate(zip(sums, per_batch, strict=True)):
        if max(seconds, line) > top * (1 + 1e-9):
            axes.text(
                position, top * 1.06, format_duration(seconds), rotation=90, ha="center", va="top", fontsize=7,
                color=COLOURS["ink"], bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1.0},
            )  # fmt: skip


def _mark(axes: Axes, split: int, freeze: int) -> None:
    """The chosen split, and the freeze at the right edge of the last frozen layer."""
    axes.axvspan(split - 0.5, split + 0.5, color=COLOURS["chosen"], alpha=0.15, linewidth=0, zorder=0.5)
    axes.axvline(freeze + 0.5, color=COLOURS["chosen"], linewidth=1.2, linestyle=":")


def _bytes_axis(axes: Axes) -> None:
    """Logarithmic, with ticks at powers of two: bytes of layers span five decades."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=4, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
