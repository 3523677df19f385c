"""The sweep that the evaluation's tables and figures are views of: every split of every cell, measured.

For a cell (model, training batch, bandwidth) a real server and a real client run on the two-tier test bed. An epoch is
profiled as ``hapi-train`` does, so that every strategy decides from the same measurements; then an epoch is run at
every split. The truth is that sweep: all splits are measured, the most promising first. One whose time so far, or whose
bytes at the link's rate alone, exceed 1.3 times the best whole epoch is not run to its end: it is recorded as over
that bound. Splits near the best, and those of the strategies' choices that are not far from it, are measured again, in
turns; what is near is narrower from turn to turn. Medians count, since one run varies by 8% here. Where that makes the
best worse, splits that were broken off too early are run again. As long as a median of those that decide, the best
and ``auto``'s choice, is not known to 2%, they are measured again, whatever that may show, up to seven times or 20 s in
all. Neighbours that send the same bytes and whose estimates differ by less than 0.5% (before and after a ReLU) are
twins: one of them is measured for both.
"""

from __future__ import annotations

import math
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hapi.bench.cells import Cell, Form, Grid, Results, done_record
from hapi.bench.loose import Bed
from hapi.bench.photos import make_store
from hapi.bench.tiers import BenchClient, start_server
from hapi.profiler.batching import FIXED_BATCH
from hapi.units import format_bandwidth, format_duration

BEYOND, SURELY_BEYOND = 1.3, 1.2
"""Times the best epoch after which a split is broken off, and which it must have exceeded in the end: every table's
last column begins earlier."""
NEAR = (1.08, 1.05)
"""Times the best epoch within which a split is measured a second time, and a third."""
CHOSEN = 1.2
"""As much for splits that strategies chose: they are compared by name, so their times must be as good as the best's.
That of ``auto`` is always measured again."""
UNSURE, MOST, ENOUGH = 0.02, 7, 20.0
"""Standard error of a median, as a share, above which what decides is measured again; how often at most, and how many
seconds in all: a long epoch is the mean of what many short ones differ by."""
TWIN = 0.005
"""Difference of estimates below which two splits that send the same bytes cannot be told apart."""
TENSORS = 2
"""Times the best epoch after which one with samples stored as tensors is broken off."""
WARM = 1
"""Batches with which both sides are made to load a split's layers before it is measured first."""

Tell = Callable[[str], None]


def sweep(bed: Bed, grid: Grid, results: Results, tell: Tell, *, seconds: float | None = None) -> None:
    """Measure on ``bed`` the cells of ``grid`` that ``results`` does not hold; at most about ``seconds``."""
    todo = [cell for cell in grid.cells() if not results.done(cell)]
    tell(f"{len(grid.cells())} cells, {len(todo)} to measure{_left(grid, results)}")
    if not todo:
        return
    began = time.monotonic()
    with bed, tempfile.TemporaryDirectory(prefix="hapi-sweep-") as folder:
        bench = _Bench(bed, Path(folder), grid, results, tell)
        for number, cell in enumerate(todo):
            if seconds is not None and time.monotonic() - began > seconds:
                tell(f"time is up: {len(todo) - number} cells are left; the same command goes on")
                return
            started = time.monotonic()
            bench.measure(cell)
            results.add(done_record(cell, time.monotonic() - started))
            tell(f"{number + 1}/{len(todo)}{_left(grid, results)}")


def _left(grid: Grid, results: Results) -> str:
    left = results.seconds_left(grid)
    if left is None:
        return "; the first will tell how long it takes"
    return f", about {format_duration(left)} left" if left else ""


class _Bench:
    """Two tiers that are kept from cell to cell."""

    def __init__(self, bed: Bed, folder: Path, grid: Grid, results: Results, tell: Tell) -> None:
        self._bed, self._grid, self._results, self._tell = bed, grid, results, tell
        token = secrets.token_hex(16)
        most = max(grid.profile_samples(bs) for bs in grid.batches)
        store = make_store(folder, most, grid.image_size)
        # The paper's. One that is looked for while splits are compared would be another for each of them.
        fixed = ("--cos-batch", str(FIXED_BATCH))
        self._url = start_server(bed, store, token, folder, fixed, device=grid.server_device)
        self._client = BenchClient(bed, token, folder)
        self._open: tuple[str, int, Form] | None = None
        self._splits: list[int] = []
        self._warm: set[int] = set()

    def measure(self, cell: Cell) -> None:
        """Plan the cell, then measure its splits."""
        samples = self._grid.samples(cell.bs)
        self._opened(cell, "images")
        self._bed.set_bandwidth(cell.bandwidth)
        profiled = self._grid.profile_samples(cell.bs)
        planned = self._client.ask("plan", samples=samples, profiled=profiled, epoch=0)
        if not planned["ok"]:
            self._results.add({"kind": "unfit", "cell": cell.key, "error": planned["error"]})
            return
        self._results.add({"kind": "plan", "cell": cell.key, "samples": samples, **planned})
        times, of = _Times(), twins(planned["wire"], planned["auto"])
        chosen = {of[split] for split in planned["choices"].values()}
        for split in sorted(set(of), key=lambda s: planned["auto"][s]):
            self._run(cell, split, samples, times, planned["wire"][split])
        auto = of[planned["choices"]["auto"]]
        for turn in range(self._grid.repeats - 1 if times.found else 0):
            again = times.near(NEAR[min(turn, len(NEAR) - 1)])
            again |= times.near(CHOSEN) & chosen | times.found.keys() & {auto}
            self._turn(cell, again, times)
        self._until_sure(cell, auto, times)
        if not times.found:
            self._tell(f"{cell.key}: no split fitted the client's memory")
            return
        for twin, measured in enumerate(of):
            if twin != measured:
                self._results.add({"kind": "twin", "cell": cell.key, "split": twin, "of": measured})
        self._tensors(cell, samples, TENSORS * times.best())
        best = times.best_split()
        told = ", ".join(
            f"{name} {split} ({times.median(of[split]) / times.best() - 1:+.0%})"
            if times.known(of[split])
            else f"{name} {split} (>)"
            for name, split in planned["choices"].items()
        )
        self._tell(
            f"{cell.key} at {format_bandwidth(cell.bandwidth)}: best {best} {times.best():.2f} s; {told}"
        )

    def _until_sure(self, cell: Cell, auto: int, times: _Times) -> None:
        for _ in range(MOST if self._grid.repeats > 1 else 0):
            if again := times.unsure(auto):
                self._turn(cell, again, times)

    def _turn(self, cell: Cell, again: set[int], times: _Times) -> None:
        """These splits once more, and those that turn out to have been broken off too early."""
        samples = self._grid.samples(cell.bs)
        for split in sorted(again):
            self._run(cell, split, samples, times)
        for split in times.doubtful(SURELY_BEYOND):
            self._run(cell, split, samples, times)

    def _tensors(self, cell: Cell, samples: int, limit: float) -> None:
        """NoSplit with samples stored as tensors, as in the papers, beside that with encoded images."""
        forms: tuple[tuple[Form, int], ...] = (("uint8", 1), ("float32", 4))
        for form, element in forms:
            least = samples * 3 * self._grid.image_size**2 * element * 8 / cell.bandwidth
            if least > limit:
                over = {"ok": True, "over": True, "seconds": least, "by": "bytes at the link's rate"}
                self._results.add({"kind": "none", "cell": cell.key, "form": form, **over})
                continue
            self._opened(cell, form)
            self._bed.set_bandwidth(None)
            warmed = self._client.ask("warm", split=0, samples=cell.bs)["ok"]
            self._bed.set_bandwidth(cell.bandwidth)
            if not warmed:
                self._results.add({"kind": "none", "cell": cell.key, "form": form, "ok": False})
                continue
            found = self._client.ask("epoch", split=0, samples=samples, epoch=1, limit=limit)
            self._results.add({"kind": "none", "cell": cell.key, "form": form, **found})

    def _opened(self, cell: Cell, form: Form) -> None:
        if self._open == (cell.model, cell.bs, form):
            return
        self._bed.set_bandwidth(None)  # weights and warm-up are not what is measured
        opened = self._client.ask(
            "open",
            server=[self._url],
            dataset=form,
            model=cell.model,
            weights="random",
            bs=cell.bs,
            request_size=self._grid.request_size,
            split="auto",
            threads=1,
            device=self._grid.client_device,
            memory=self._grid.memory,
            replan="off",
        )
        self._open, self._splits, self._warm = (cell.model, cell.bs, form), opened["splits"], set()
        self._bed.set_bandwidth(cell.bandwidth)

    def _run(
        self, cell: Cell, split: int, samples: int, times: _Times, wire_bytes: int | None = None
    ) -> None:
        """One epoch at ``split``; with ``wire_bytes`` (an epoch's) only as much of it as shows that it is beyond."""
        bound = BEYOND * times.best() if times.found and wire_bytes is not None else None
        least = 0.0 if wire_bytes is None else wire_bytes * 8 / cell.bandwidth
        if bound is not None and least > bound:
            times.bounds[split] = least
            record = {"split": split, "over": True, "seconds": least, "bytes": wire_bytes}
            self._results.add({"kind": "run", "cell": cell.key, "by": "bytes at the link's rate", **record})
            return
        if split not in self._warm:
            self._bed.set_bandwidth(None)
            self._client.ask("warm", split=split, samples=WARM * cell.bs)
            self._bed.set_bandwidth(cell.bandwidth)
            self._warm.add(split)
        found = self._client.ask("epoch", split=split, samples=samples, epoch=1, limit=bound)
        self._results.add({"kind": "run", "cell": cell.key, "split": split, **found})
        if found["ok"] and found["over"]:
            times.bounds[split] = found["seconds"]
        elif found["ok"]:
            times.add(split, found["seconds"])


def twins(wire: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """By split, the split that is measured for it: itself, or the first of neighbours that differ in nothing."""
    of: list[int] = []
    for split in range(len(wire)):
        first = of[-1] if of else split
        alike = wire[split] == wire[first] and abs(seconds[split] - seconds[first]) <= TWIN * seconds[first]
        of.append(first if alike else split)
    return of


class _Times:
    """Whole epochs by split."""

    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}
        self.bounds: dict[int, float] = {}
        """Of splits that were broken off."""

    def add(self, split: int, seconds: float) -> None:
        self.found.setdefault(split, []).append(seconds)
        self.bounds.pop(split, None)

    def doubtful(self, factor: float) -> list[int]:
        """Splits that were broken off too early, as seen from the best that is known now."""
        limit = factor * self.best()
        return sorted(split for split, bound in self.bounds.items() if bound < limit)

    def unsure(self, auto: int) -> set[int]:
        """The splits that decide, if the median of one of them is not known well enough and can still be."""
        if not self.found:
            return set()
        deciding = self.near(NEAR[-1]) | self.found.keys() & {auto}
        if len(deciding) < 2 or all(_standard_error(self.found[split]) <= UNSURE for split in deciding):
            return set()
        return {s for s in deciding if len(self.found[s]) < MOST and sum(self.found[s]) < ENOUGH}

    def known(self, split: int) -> bool:
        return split in self.found

    def median(self, split: int) -> float:
        return statistics.median(self.found[split])

    def best(self) -> float:
        return min(self.median(split) for split in self.found)

    def best_split(self) -> int:
        return min(self.found, key=self.median)

    def slower(self, split: int) -> str:
        """How much slower than the best, for a person."""
        return f"{self.median(split) / self.best() - 1:+.0%}" if self.known(split) else "beyond"

    def near(self, factor: float) -> set[int]:
        limit = factor * self.best()
        return {split for split in self.found if self.median(split) <= limit}


def _standard_error(times: Sequence[float]) -> float:
    """Of the median of such times (of normal ones), as a share of it."""
    if len(times) < 2:
        return math.inf
    return math.sqrt(math.pi / 2 / len(times)) * statistics.stdev(times) / statistics.median(times)


def sweep_conditions(grid: Grid) -> dict[str, Any]:
    """What a sweep's figures were measured under, beside the machine's own."""
    return {"grid": asdict(grid), "threads": "1 per tier", "data": "crops of scikit-learn's photographs"}
