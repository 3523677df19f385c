"""Figures of a run: stages and split of every epoch, loss and accuracy, one training batch in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hapi.figures.canvas import COLOURS, canvas, inline_svg, legend, seconds_axis
from hapi.figures.reading import STAGES, Epoch, StageSpan
from hapi.text import counted
from hapi.units import format_duration

_EPOCHS_WITH_LABELS = 30
_EPOCHS_WITH_MARKS = 200
"""Most epochs with bars and marks; with more, they would be too thin and take minutes, so lines alone are
drawn.
"""


def epochs_svg(epochs: Sequence[Epoch]) -> str:
    """Draw seconds of server, network, client and stall per epoch, with its whole duration and the estimate."""
    with canvas(9.0, 3.6) as figure:
        axes = figure.subplots()
        positions, few = range(len(epochs)), len(epochs) <= _EPOCHS_WITH_MARKS
        for index, kind in enumerate((*STAGES, "stall")):
            heights = [getattr(e, kind) for e in epochs]
            if few:
                lefts = [x + (index - 1.5) * 0.2 for x in positions]
                axes.bar(lefts, heights, 0.2, color=COLOURS[kind], label=kind)
            else:
                axes.plot(positions, heights, color=COLOURS[kind], linewidth=1.0, label=kind)
        seconds = [e.seconds for e in epochs]
        axes.plot(positions, seconds, color=COLOURS["ink"], **_marks(epochs), label="epoch")
        known = [(x, e.estimated) for x, e in enumerate(epochs) if e.estimated is not None]
        if known:
            axes.plot(
                [x for x, _ in known], [y for _, y in known], color=COLOURS["chosen"], linewidth=1.0,
                linestyle="none" if few else "-", marker="D" if few else "none", markersize=4.5, label="estimated",
            )  # fmt: skip
        axes.set_title("Seconds of each epoch")
        _epoch_ticks(axes, [f"{e.number}\nsplit {_splits(e)}" for e in epochs])
        axes.set_ylim(bottom=0)
        seconds_axis(axes)
        legend(axes)
        return inline_svg(figure, "epochs", f"Seconds of the stages of {counted(len(epochs), 'epoch')}")


def learning_svg(epochs: Sequence[Epoch]) -> str:
    """Draw loss and accuracy over the epochs, of training and, where measured, validation.

    Without any accuracy (numbers as labels) the first metric of the validation takes its place.
    """
    if all(e.accuracy is None and e.validation_accuracy is None for e in epochs):
        return _losses_svg(epochs)
    with canvas(9.0, 2.9) as figure:
        panels = figure.subplots(1, 2)
        for axes, kind, percent in ((panels[0], "loss", 1.0), (panels[1], "accuracy", 100.0)):
            for prefix, name, colour in (("", "training", "ink"), ("validation_", "validation", "chosen")):
                values = [getattr(e, prefix + kind) for e in epochs]
                if any(v is not None for v in values):
                    drawn = [math.nan if v is None else v * percent for v in values]
                    axes.plot(range(len(epochs)), drawn, color=COLOURS[colour], **_marks(epochs), label=name)
            axes.set_title("Loss" if kind == "loss" else "Accuracy, %")
            _epoch_ticks(axes, [str(e.number) for e in epochs])
            legend(axes)
        return inline_svg(figure, "learning", "Loss and accuracy per epoch, training and validation")


def _losses_svg(epochs: Sequence[Epoch]) -> str:
    with canvas(9.0, 2.9) as figure:
        names = [*dict.fromkeys(name for e in epochs for name, _ in e.metrics)][:1]
        panels = figure.subplots(1, 1 + len(names), squeeze=False)[0]
        lines = [
            (panels[0], "training", "ink", [e.loss for e in epochs]),
            (panels[0], "validation", "chosen", [e.validation_loss for e in epochs]),
            *(
                (panels[1], "validation", "chosen", [dict(e.metrics).get(name) for e in epochs])
                for name in names
            ),
        ]
        for axes, label, colour, values in lines:
            if any(v is not None for v in values):
                drawn = [math.nan if v is None else v for v in values]
                axes.plot(range(len(epochs)), drawn, color=COLOURS[colour], **_marks(epochs), label=label)
        for axes, title in zip(panels, ("Loss", *names), strict=True):
            axes.set_title(title)
            _epoch_ticks(axes, [str(e.number) for e in epochs])
            legend(axes)
        return inline_svg(figure, "learning", "Loss per epoch, training and validation")


def timeline_svg(spans: Sequence[StageSpan]) -> str:
    """Draw the three stages of one training batch over the seconds since its first request."""
    with canvas(9.0, 2.2) as figure:
        axes = figure.subplots()
        for row, stage in enumerate(STAGES):
            bars = [(s.start, max(s.end - s.start, 0.0)) for s in spans if s.stage == stage]
            axes.broken_barh(
                bars, (row - 0.36, 0.72), color=COLOURS[stage], edgecolor=COLOURS[stage], linewidth=0.8
            )
        axes.set_yticks(range(len(STAGES)), STAGES)
        axes.set_ylim(len(STAGES) - 0.4, -0.6)
        axes.set_xlim(min(0.0, min(s.start for s in spans)), max(s.end for s in spans) * 1.01 or 1.0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: format_duration(value) if value > 0 else "0")
        return inline_svg(figure, "timeline", "One training batch across server, network and client")


def _marks(epochs: Sequence[Epoch]) -> dict[str, Any]:
    """Line style that shows epochs."""
    return {"marker": "o", "markersize": 4} if len(epochs) <= _EPOCHS_WITH_MARKS else {}


def _splits(epoch: Epoch) -> str:
    found = [str(split) for split, _ in epoch.splits]
    return "+".join(found) if 0 < len(found) <= 3 else str(epoch.split)


def _epoch_ticks(axes: Any, labels: Sequence[str]) -> None:
    step = max(1, -(-len(labels) // _EPOCHS_WITH_LABELS))
    crowded = len(labels) > 12
    positions = list(range(0, len(labels), step))
    shown = [labels[i].replace("\nsplit", ":") if crowded else labels[i] for i in positions]
    axes.set_xticks(positions, shown, rotation=90 if crowded else 0)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_xlabel("epoch")
