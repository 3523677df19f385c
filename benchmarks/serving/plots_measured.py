"""Figures of the benchmarks that measure for themselves: layers, model reuse, concurrency, the COS batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.serving.batching import GOAL, BatchingRow
from benchmarks.serving.concurrency import AT_ONCE, ConcurrencyRow, TenantsRow
from benchmarks.serving.layers import LayerRow
from benchmarks.serving.reuse import ReuseRow
from benchmarks.split import paper
from hapi.figures.canvas import COLOURS, canvas, save

_ONE, _TWO = COLOURS["network"], COLOURS["server"]


def draw_layers(rows: Sequence[LayerRow], path: str) -> None:
    """Output over input, seconds and memory by layer, a line for each model; dots at the freeze (Figure 2)."""
    panels: tuple[tuple[str, Callable[[LayerRow], float], bool], ...] = (
        ("output of a sample over the input's", lambda row: row.output_bytes / row.input_bytes, True),
        ("forward pass, ms", lambda row: row.seconds * 1e3, False),
        ("memory, MiB", lambda row: row.memory_bytes / 2**20, False),
    )
    with canvas(8.0, 8.5) as figure:
        all_axes = figure.subplots(len(panels), 1, sharex=True)
        for axes, (title, value, logarithmic) in zip(all_axes, panels, strict=True):
            for model in dict.fromkeys(row.model for row in rows):
                of = [row for row in rows if row.model == model]
                (line,) = axes.plot([r.layer for r in of], [value(r) for r in of], linewidth=1.3, label=model)
                frozen = [r for r in of if r.frozen][-1:]
                axes.plot([r.layer for r in frozen], [value(r) for r in frozen], "o", color=line.get_color())
            axes.set_title(title)
            if logarithmic:
                axes.axhline(1.0, color=COLOURS["muted"], linewidth=0.8)
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        all_axes[0].legend(ncols=4, loc="upper right")
        all_axes[-1].set_xlabel("layer; dots: the freeze")
        save(figure, path)


def draw_reuse(rows: Sequence[ReuseRow], path: str) -> None:
    """The speed-up (Figure 12), and loading's share of a request beside the paper's (Table 4)."""
    with canvas(8.0, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        names = [row.model for row in rows]
        left.bar(range(len(rows)), [row.speedup for row in rows], color=_TWO)
        left.axhline(1.0, color=COLOURS["muted"], linewidth=0.8)
        left.set_title("epoch, layers loaded over kept (Figure 12)")
        ours = [100 * row.load_seconds / row.request_seconds if row.request_seconds else 0.0 for row in rows]
        theirs = [
            100 * load / whole for load, whole in (paper.MODEL_LOAD.get(name, (0.0, 1.0)) for name in names)
        ]
        right.bar([i - 0.2 for i in range(len(rows))], ours, width=0.4, color=_TWO, label="here")
        right.bar(
            [i + 0.2 for i in range(len(rows))], theirs, width=0.4, color=COLOURS["stall"], label="paper"
        )
        right.set_title("loading, % of a request (Table 4)")
        right.legend()
        for axes in (left, right):
            axes.set_xticks(range(len(rows)), names, rotation=90)
        save(figure, path)


def draw_concurrency(rows: Sequence[ConcurrencyRow], tenants: Sequence[TenantsRow], path: str) -> None:
    """The speed-up of requests side by side (Figure 14), and the rate of several clients over one's."""
    with canvas(max(7.0, 2.0 + 0.3 * len(rows)), 7.0) as figure:
        top, bottom = figure.subplots(2, 1)
        for number, (count, colour) in enumerate(zip(AT_ONCE[1:], (COLOURS["stall"], _TWO), strict=True)):
            positions = [i + (number - 0.5) * 0.38 for i in range(len(rows))]
            top.bar(
                positions,
                [r.speedup(count) for r in rows],
                width=0.38,
                color=colour,
                label=f"{count} at once",
            )
        top.axhline(1.0, color=COLOURS["muted"], linewidth=0.8)
        top.set_xticks(range(len(rows)), [f"{r.model} {r.split}" for r in rows], rotation=90, fontsize=7)
        top.set_title("requests at once over one after another (Figure 14)")
        top.legend(ncols=2)
        alone = {row.model: row.makespan for row in tenants if row.clients == 1}
        names = [f"{row.model} {row.clients}" for row in tenants]
        heights = [row.clients * alone[row.model] / row.makespan for row in tenants]
        bottom.bar(range(len(tenants)), heights, color=_ONE)
        bottom.set_xticks(range(len(tenants)), names, rotation=90, fontsize=7)
        bottom.set_title("samples/s of several clients over one's")
        save(figure, path)


def draw_batching(rows: Sequence[BatchingRow], path: str) -> None:
    """Seconds per sample over the best's by COS batch, a line for each model; dots at the choice of ``auto``."""
    with canvas(8.0, 4.5) as figure:
        axes = figure.subplots(1, 1)
        for row in rows:
            batches = list(row.seconds)
            over = [row.over_best(batch) for batch in batches]
            (line,) = axes.plot(batches, over, linewidth=1.3, label=f"{row.model} {row.split}")
            auto = row.chosen["auto"]
            axes.plot([auto], [row.over_best(auto)], "o", color=line.get_color())
        axes.axhline(GOAL, color=COLOURS["muted"], linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("COS batch; dots: chosen by auto; line: 3% above the best")
        axes.set_title("seconds per sample over the best")
        axes.legend(ncols=4, loc="upper right")
        save(figure, path)
