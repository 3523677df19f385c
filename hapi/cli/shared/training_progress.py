"""Lines and the live bar of a training on the console."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hapi.train.callbacks import TrainingCallback
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.client.loading.epoch_stats import PassReport
    from hapi.client.planning.controller import SplitController


class ProgressPrinter(TrainingCallback):
    """A live bar on a terminal, and one line per epoch and per change of split everywhere."""

    def __init__(self, live: bool, planning: SplitController | None) -> None:
        self._live = live
        self._planning = planning
        self._reported = 0
        """Changes of split that were printed."""
        self._bar: Any = None
        self._started = 0.0

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Begin the epoch's bar."""
        if self._live:
            from tqdm import tqdm

            # A terminal that does not tell its width (0) would get no bar at all.
            unknown = shutil.get_terminal_size((80, 24)).columns == 80
            self._bar = tqdm(
                total=batches,
                initial=done,
                desc=f"epoch {epoch}",
                leave=False,
                ncols=80 if unknown else None,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}",
            )
            self._started = time.monotonic()

    def step_done(self, report: PassReport) -> None:
        """Show samples/s, wire MB/s and the share of time spent waiting."""
        if self._bar is None:
            return
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"{report.samples / seconds:.0f} samples/s, "
            f"{report.traffic.bytes_received / seconds / 1e6:.1f} MB/s, "
            f"stall {100 * report.stall_seconds / seconds:.0f}%",
            refresh=False,
        )
        self._bar.update()

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Print the epoch's line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
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
            print(f"split {moved} at epoch {change.epoch}, batch {change.batch}: {change.why}", flush=True)
        self._reported = len(changes)


def _epoch_line(entry: Mapping[str, Any]) -> str:
    seconds = max(entry["seconds"], 1e-9)
    line = (
        f"epoch {entry['epoch']:>3}  split {_splits(entry):>5}  {entry['seconds']:8.2f} s  "
        f"{entry['samples'] / seconds:7.0f} samples/s  wire {format_bytes(entry['bytes_received']):>10}  "
        f"{_cached(entry)}stall {100 * entry['stall_seconds'] / seconds:3.0f}%  loss {entry['loss']:.4f}"
    )
    if entry["accuracy"] is not None:
        line += f"  accuracy {100 * entry['accuracy']:5.1f}%"
    if "validation_loss" in entry:
        line += f"  validation {entry['validation_loss']:.4f}"
    if entry.get("validation_accuracy") is not None:
        line += f" / {100 * entry['validation_accuracy']:.1f}%"
    return line


def _cached(entry: Mapping[str, Any]) -> str:
    """The part of the epoch's samples that came out of the sample cache, if any did."""
    cached = entry["cached_samples"]
    return f"cached {100 * cached / entry['samples']:3.0f}%  " if cached else ""


def _splits(entry: Mapping[str, Any]) -> str:
    """The splits of the epoch's batches, such as ``0/11``."""
    return "/".join(str(split) for split, _ in entry["splits"][:3]) or str(entry["split"])
