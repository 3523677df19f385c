"""``benchmarks steps``: a link whose bandwidth changes under a run, beside runs that knew the bandwidth.

A real ``hapi-server`` and real ``hapi-train`` processes on the two-tier test bed, in turns: one run at each
bandwidth from its beginning to its end, then one whose link is changed between two epochs. Two things count:
the last epoch of each stretch, over the same bandwidth's run, and the equality of all runs' losses. With ``--off``
the changed run is repeated in the same turn with a mechanism of planning turned off.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.split.without import ALL_ON
from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.testbed import TestBed
from benchmarks.testbed.tiers import environment, last_line, start_server
from hapi.errors import TransportError
from hapi.units import format_bandwidth

GOAL = 1.10
"""Largest ratio, to the run that knew the bandwidth, that a stretch may end with."""
_RUN_SECONDS = 1800.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class StepsSettings:
    """Measurements to take."""

    model: str = "resnet18"
    bandwidths: tuple[float, ...] = (100e6, 10e6, 100e6)
    """Bits per second, of one stretch after the other."""
    epochs: int = 4
    """Epochs of each stretch; the first of all is profiled."""
    samples: int = 640
    batch: int = 64
    request_size: int = 16
    image_size: int = 64
    repeats: int = 3
    off: tuple[str, ...] = ()
    """Mechanisms of :data:`benchmarks.split.without.SWITCHES`, each turned off in a further run of each turn."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The epochs of one run at one bandwidth."""

    bandwidth: float
    seconds: tuple[float, ...]
    """Seconds of each epoch."""
    splits: tuple[int, ...]
    """Split of each epoch's last batch."""
    changes: tuple[str, ...]
    """Changes of the split: batches from the stretch's beginning, and both splits."""


@dataclass(frozen=True, kw_only=True)
class StepsRow:
    """One stretch of the run whose link changed; seconds are medians over the repetitions."""

    stretch: int
    bandwidth: float
    splits: tuple[int, ...]
    """Split at the stretch's end, of each repetition."""
    known_splits: tuple[int, ...]
    """Splits of the runs that knew the bandwidth."""
    seconds: float
    """The stretch's last epoch."""
    known_seconds: float
    ratios: tuple[float, ...]
    changes: tuple[tuple[str, ...], ...]

    @property
    def ratio(self) -> float:
        """The median over the repetitions."""
        return statistics.median(self.ratios)


@dataclass(frozen=True, kw_only=True)
class StepsResult:
    """All rows of one run, and its conditions."""

    rows: tuple[StepsRow, ...]
    without: Mapping[str, tuple[StepsRow, ...]]
    """The same stretches with a mechanism off, by its name."""
    loss_difference: float
    """The largest difference between two runs' losses of the same epoch, as a share of the loss."""
    conditions: dict[str, Any]

    @property
    def worst(self) -> float:
        """The largest ratio."""
        return max(row.ratio for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "steps",
            "rows": _documents(self.rows),
            "without": {name: _documents(rows) for name, rows in self.without.items()},
            "worst": self.worst,
            "goal": GOAL,
            "loss_difference": self.loss_difference,
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        lines = [
            f"{'stretch':>7}{'link':>14}  {'split':<12}{'known':<12}{'epoch':>9}{'known':>9}{'ratio':>8}  (of each)"
        ]
        for r in self.rows:
            splits, known = (",".join(map(str, found)) for found in (r.splits, r.known_splits))
            lines.append(
                f"{r.stretch:>7}{format_bandwidth(r.bandwidth):>14}  {splits:<12}{known:<12}"
                f"{r.seconds:>7.2f} s{r.known_seconds:>7.2f} s{r.ratio:>8.3f}  ({_listed(r.ratios)})"
            )
            lines += [f"{'':>23}{'; '.join(changes) or 'no change'}" for changes in r.changes]
        for name, rows in self.without.items():
            ratios = "  ".join(f"{r.ratio:.3f} ({_listed(r.ratios)})" for r in rows)
            lines.append(f"without {name + ':':<34} {ratios}")
        verdict = "reached" if self.worst <= GOAL else "missed"
        lines.append(
            f"goal: each stretch ends within {GOAL - 1:.0%} of the run that knew; worst {self.worst:.3f}: {verdict}"
        )
        lines.append(f"losses of all runs differ by at most {self.loss_difference:.1e} of the loss")
        return lines


def _documents(rows: Sequence[StepsRow]) -> list[dict[str, Any]]:
    return [{**asdict(row), "ratio": row.ratio} for row in rows]


def _listed(ratios: Sequence[float]) -> str:
    return " ".join(f"{ratio:.2f}" for ratio in ratios)


def measure_steps(settings: StepsSettings, tell: Callable[[str], None]) -> StepsResult:
    """Run them all; ``tell`` gets a line as each run is done.

    Raises :class:`UsageError` when there can be no test bed here, :class:`TransportError` when a tier fails.
    """
    found = {**conditions(), "settings": asdict(settings), "threads": "1 per tier"}
    known: dict[float, list[Stretch]] = {bandwidth: [] for bandwidth in settings.bandwidths}
    stepped: dict[str, list[list[Stretch]]] = {name: [] for name in (ALL_ON, *settings.off)}
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="hapi-steps-") as folder, TestBed() as bed:
        store = make_store(Path(folder), settings.samples, settings.image_size, ("images",))
        token = secrets.token_hex(16)
        found["test_bed"] = bed.describe()
        bench = _Bench(
            bed, start_server(bed, store, token, Path(folder)), token, Path(folder), settings, tell
        )
        for _ in range(settings.repeats):
            for bandwidth, runs in known.items():
                stretches, run_losses = bench.run([bandwidth])
                runs += stretches
                losses.append(run_losses)
            for off, repeated in stepped.items():
                stretches, run_losses = bench.run(settings.bandwidths, off)
                repeated.append(stretches)
                losses.append(run_losses)
    rows = {off: rows_of(known, repeated) for off, repeated in stepped.items()}
    return StepsResult(
        rows=rows.pop(ALL_ON), without=rows, loss_difference=loss_difference(losses), conditions=found
    )


def rows_of(
    known: Mapping[float, Sequence[Stretch]], stepped: Sequence[Sequence[Stretch]]
) -> tuple[StepsRow, ...]:
    """A row for each stretch; every repetition beside the one of its own turn."""
    rows = []
    for number in range(len(stepped[0])):
        mine = [stretches[number] for stretches in stepped]
        theirs = known[mine[0].bandwidth]
        rows.append(
            StepsRow(
                stretch=number + 1,
                bandwidth=mine[0].bandwidth,
                splits=tuple(s.splits[-1] for s in mine),
                known_splits=tuple(s.splits[-1] for s in theirs),
                seconds=statistics.median(s.seconds[-1] for s in mine),
                known_seconds=statistics.median(_settled(s) for s in theirs),
                ratios=tuple(
                    round(a.seconds[-1] / _settled(b), 4) for a, b in zip(mine, theirs, strict=True)
                ),
                changes=tuple(s.changes for s in mine),
            )
        )
    return tuple(rows)


def _settled(known: Stretch) -> float:
    """Seconds of an epoch after the profiled one."""
    return statistics.median(known.seconds[1:] or known.seconds)


def loss_difference(losses: Sequence[Sequence[float]]) -> float:
    """The largest difference of an epoch's losses, over its smallest; runs may have different numbers of epochs."""
    longest = max(len(run) for run in losses)
    columns = [[run[epoch] for run in losses if epoch < len(run)] for epoch in range(longest)]
    return max((max(found) - min(found)) / min(found) for found in columns)


def stretches_of(report: Mapping[str, Any], bandwidths: Sequence[float], epochs: int) -> list[Stretch]:
    """A report's epochs, ``epochs`` for each bandwidth."""
    found = []
    batches = sum(count for _, count in report["epochs"][0]["splits"])
    for number, bandwidth in enumerate(bandwidths):
        first = number * epochs
        mine = report["epochs"][first : first + epochs]
        changes = [c for c in report["plan"]["changes"] if first <= c["epoch"] < first + epochs]
        found.append(
            Stretch(
                bandwidth=bandwidth,
                seconds=tuple(e["seconds"] for e in mine),
                splits=tuple(e["split"] for e in mine),
                changes=tuple(
                    f"batch {(c['epoch'] - first) * batches + c['batch']}: {c['from']} to {c['to']}, {c['why']}"
                    for c in changes
                ),
            )
        )
    return found


class _Bench:
    """A server that stays, and a trainer for each run."""

    def __init__(
        self,
        bed: TestBed,
        url: str,
        token: str,
        folder: Path,
        settings: StepsSettings,
        tell: Callable[[str], None],
    ) -> None:
        self._bed, self._url, self._token, self._folder = bed, url, token, folder
        self._settings, self._tell = settings, tell

    def run(self, bandwidths: Sequence[float], off: str = ALL_ON) -> tuple[list[Stretch], list[float]]:
        """(the stretches, the epochs' losses) of a run whose link has these bandwidths, one after the other.

        ``off`` is the mechanism of planning that does not run.
        """
        settings, log, report = self._settings, self._folder / "train.log", self._folder / "report.json"
        flags = {
            "--server": self._url,
            "--dataset": "images",
            "--model": settings.model,
            "--weights": "random",
            "--bs": settings.batch,
            "--request-size": settings.request_size,
            "--epochs": settings.epochs * len(bandwidths),
            "--lr": 0.001,
            "--threads": 1,
            "--device": "cpu",
            "--report": report,
        }
        command = [sys.executable, "-m", "benchmarks.split.without", off, "--no-progress", "--no-output"]
        command += [f"{flag}={value}" for flag, value in flags.items()]
        self._bed.set_bandwidth(bandwidths[0])
        with log.open("wb") as output:
            process = self._bed.start(
                "client", command, env=environment(self._token), stdout=output, stderr=output
            )
            for number, bandwidth in enumerate(bandwidths[1:]):
                self._wait(process, log, (number + 1) * settings.epochs)
                self._bed.set_bandwidth(bandwidth)
            self._wait(process, log, None)
        if process.returncode != 0:
            raise TransportError(f"hapi-train failed on the test bed: {last_line(log.read_text())}")
        found = json.loads(report.read_text(encoding="utf-8"))
        stretches = stretches_of(found, bandwidths, settings.epochs)
        for s in stretches:
            seconds = " ".join(f"{x:.2f}" for x in s.seconds)
            self._tell(f"{off}, {format_bandwidth(s.bandwidth)}: splits {s.splits}, seconds {seconds}")
        return stretches, [e["loss"] for e in found["epochs"]]

    def _wait(self, process: subprocess.Popen[str], log: Path, epochs: int | None) -> None:
        """Wait until so many epochs were printed, or for None until the end."""
        deadline = time.monotonic() + _RUN_SECONDS
        while process.poll() is None:
            if epochs is not None and _epochs_printed(log) >= epochs:
                return
            if time.monotonic() > deadline:
                raise TransportError(f"hapi-train did not end within {_RUN_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)


def _epochs_printed(log: Path) -> int:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return sum(line.startswith("epoch") for line in lines)
