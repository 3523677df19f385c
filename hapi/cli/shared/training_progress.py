"""Lines and the live bar of a training on the console; lines fit 100 columns."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hapi.cli.shared.lines import LINE_COLUMNS, print_wrapped
from hapi.train.callbacks import StepDone, TrainingCallback
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.client.planning.controller import SplitController

_COLUMNS = 80
"""Width of a terminal that does not tell it."""
_BAR = 6
"""Columns that figures leave to the bar itself."""
_SHOWN_SECONDS = 0.1
"""Seconds between two drawings of the bar, as tqdm has it; steps between them cost nothing."""
_FIGURES_SECONDS = 0.5
"""Seconds between two readings of loss and accuracy, which wait for the device."""


class ProgressPrinter(TrainingCallback):
    """A live bar on a terminal, and one line per epoch and per change of split everywhere."""

    def __init__(self, live: bool, planning: SplitController | None) -> None:
        self._live = live
        self._planning = planning
        self._reported = 0
        """Changes of split that were printed."""
        self._bar: Any = None
        self._started = self._read_at = self._shown_at = 0.0
        self._steps = 0
        """Steps that the bar does not show yet."""
        self._figures: list[str] = []
        self._fixed = 0
        """Columns of the bar without figures."""

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Begin the epoch's bar."""
        if self._live:
            from hapi.cli.shared.steady_bar import SteadyBar

            self._bar = SteadyBar(
                total=batches,
                initial=done,
                desc=f"epoch {epoch}",
                leave=False,
                mininterval=0.0,
                ncols=_columns(),
                bar_format="{desc}: {bar} {n_fmt}/{total_fmt} <{remaining}{postfix}",
            )
            self._fixed = len(f"epoch {epoch}: ") + _BAR + len(f" {batches}/{batches} <00:00, ")
            self._started, self._read_at, self._figures = time.monotonic(), 0.0, []
            self._shown_at, self._steps = 0.0, 0

    def step_done(self, step: StepDone) -> None:
        """Show loss, accuracy, learning rate, samples/s, wire MB/s and the share of time spent waiting, as fits."""
        if self._bar is None:
            return
        self._steps += 1
        now = time.monotonic()
        if now - self._shown_at < _SHOWN_SECONDS:
            return
        self._shown_at = now
        if now - self._read_at >= _FIGURES_SECONDS:
            self._figures, self._read_at = _figures_of(step), now
        seconds, report = max(now - self._started, 1e-9), step.report
        parts = [
            *self._figures,
            f"{report.samples / seconds:.0f}/s",
            f"{report.traffic.bytes_received / seconds / 1e6:.1f} MB/s",
            f"stall {100 * report.stall_seconds / seconds:.0f}%",
        ]
        self._bar.ncols = _columns()
        self._bar.set_postfix_str(_that_fit(parts, self._bar.ncols - self._fixed), refresh=False)
        self._bar.update(self._steps)
        self._steps = 0

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Print the epoch's line."""
        self._end_bar()
        print(_epoch_line(entry), flush=True)
        if self._planning is None:
            return
        changes = self._planning.changes
        for change in changes[max(self._reported, self._planning.earlier_changes) :]:
            moved = (
                f"from {change.before} to {change.after}"
                if change.before != change.after
                else f"stays {change.after}"
            )
            print_wrapped(f"split {moved} at epoch {change.epoch}, batch {change.batch}: {change.why}")
        self._reported = len(changes)

    def training_ended(self, report: Mapping[str, Any]) -> None:
        """Wipe the bar of an epoch that did not end."""
        self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _columns() -> int:
    """Columns of the terminal that bars are drawn on, less one: some go to the next line after the last one."""
    try:
        found = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return (found or _COLUMNS) - 1


def _figures_of(step: StepDone) -> list[str]:
    """The epoch's means so far, and the learning rate; the smallest and largest of several."""
    figures = step.figures()
    rates = sorted({f"{rate:.3g}" for rate in step.rates}, key=float)
    shown = [f"loss {figures['loss']:.4f}"]
    if figures.get("accuracy") is not None:
        shown.append(f"acc {100 * figures['accuracy']:.1f}%")
    return [*shown, f"lr {'-'.join(dict.fromkeys((rates[0], rates[-1])))}"]


def _that_fit(parts: Sequence[str], columns: int) -> str:
    """The first of ``parts``, joined, as many as ``columns`` hold."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > columns:
            break
        text = longer
    return text


def _epoch_line(entry: Mapping[str, Any]) -> str:
    """The epoch's line in columns; what does not fit one line is left out, the figures never."""
    seconds = max(entry["seconds"], 1e-9)
    costs = [
        f"{_seconds(entry['seconds'])} s",
        f"{entry['samples'] / seconds:>4.0f}/s",
        f"{format_bytes(entry['bytes_received']):>9}",
        *_cached(entry),
        f"stall {100 * entry['stall_seconds'] / seconds:3.0f}% ",
    ]
    figures = f"loss {entry['loss']:.4f}{_share(' acc', entry.get('accuracy'))}"
    if "validation_loss" in entry:
        figures += f"  val {entry['validation_loss']:.4f}{_share('', entry.get('validation_accuracy'))}"
    start = f"epoch {entry['epoch']:>3}  split {_splits(entry):>5}"
    line = " ".join([start, *costs, figures])
    while len(line) > LINE_COLUMNS and costs:
        line = " ".join(" ".join([start, *costs, figures]).split())
        costs.pop()
    return line


def _share(name: str, share: float | None) -> str:
    """A share as percent after its name; nothing where there is none."""
    return "" if share is None else f"{name} {100 * share:.1f}%"


def _seconds(seconds: float) -> str:
    return f"{seconds:6.2f}" if seconds < 1e3 else f"{seconds:6.0f}"


def _cached(entry: Mapping[str, Any]) -> list[str]:
    """The part of the epoch's samples that came out of the cache, as they are stored or as features, if any did."""
    cached = entry["cached_samples"] + entry.get("feature_hits", 0)
    return [f"cached {100 * cached / entry['samples']:3.0f}%"] if cached else []


def _splits(entry: Mapping[str, Any]) -> str:
    """The splits of the epoch's batches, such as ``0/11``; a dash when everything was kept."""
    if not entry["splits"] and entry.get("feature_hits"):
        return "-"
    return "/".join(str(split) for split, _ in entry["splits"][:3]) or str(entry["split"])
