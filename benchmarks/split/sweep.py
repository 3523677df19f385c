"""The sweep that the evaluation's tables and figures are views of: every split of every cell, measured.

For a cell (model, training batch, bandwidth) a real server and a real client run on the two-tier test bed. An epoch is
profiled as ``hapi-train`` does, so that every strategy decides from the same measurements; then an epoch is run at
every split. The truth is that sweep: all splits are measured, the most promising first. One whose time so far, or whose
bytes at the link's rate alone, exceed 1.3 times the best whole epoch is not run to its end: it is recorded as over
that bound. Then the cell is profiled once more, and strategies choose from the mean of both: the profiled epochs are
far shorter than a real job's, and a machine that others share is now fast, now slow, for seconds. Splits near the
best, and those of the choices that are not far from it, are measured again, in turns; what is near is narrower from
turn to turn. Medians count, since one run varies by 8% here. Where that makes the best worse, splits that were broken
off too early are run again. As long as a median of those that decide, the best and ``auto``'s choice, is not known to
1.5%, they are measured again, whatever that may show, up to 20 s (``--enough``) each. Cells that are done are gone on
with when more profiles or seconds are asked for, all of them alike. Neighbours that send the same bytes and whose
estimates differ by less than 0.5% (before and after a ReLU) are twins: one of them is measured for both.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.split.cell_epochs import DECIDING, Epochs
from benchmarks.testbed.bed import Bed
from benchmarks.testbed.cells import Cell, Form, Grid, Results, done_record, last_begun
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import BenchClient, start_server
from hapi.server.batching.policies import FIXED_BATCH
from hapi.units import format_bandwidth, format_duration

BEYOND, SURELY_BEYOND = 1.3, 1.2
"""Times the best epoch after which a split is broken off, and which it must have exceeded in the end: every table's
last column begins earlier."""
REPEAT_WITHIN = (1.08, DECIDING)
"""Times the best epoch within which a split is measured a second time, and a third."""
CHOSEN = 1.2
"""The same for splits that strategies chose: they are compared by name, so their times must be as good as the
best's. ``auto``'s is always measured again.
"""
TWIN = 0.005
"""Difference of estimates below which two splits that send the same bytes cannot be told apart."""
TENSORS = 2
"""Times the best epoch after which one with samples stored as tensors is broken off."""
WARM = 1
"""Batches with which both sides are made to load a split's layers before it is measured first."""

Tell = Callable[[str], None]


def sweep(bed: Bed, grid: Grid, results: Results, tell: Tell, *, seconds: float | None = None) -> None:
    """Measure on ``bed`` what ``results`` does not hold of the cells of ``grid``; at most about ``seconds``.

    Cells that are not done come first, then those that are, of which more is asked for now.
    """
    fresh = [cell for cell in grid.cells() if not results.done(cell)]
    more = [cell for cell in grid.cells() if results.done(cell) and _more_seconds(cell, grid, results)]
    todo = fresh + more
    to_go_on = f", {len(more)} to go on with" if more else ""
    tell(f"{len(grid.cells())} cells, {len(fresh)} to measure{to_go_on}{_left(grid, results)}")
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
            before = sum(record["seconds"] for record in results.of(cell, "done")[-1:])
            bench.measure(cell)
            results.add(done_record(cell, before + time.monotonic() - started))
            tell(f"{number + 1}/{len(todo)}{_left(grid, results)}")


def _left(grid: Grid, results: Results) -> str:
    left = results.seconds_left(grid)
    if left is None:
        return "; the first will tell how long it takes"
    left += sum(_more_seconds(cell, grid, results) for cell in grid.cells() if results.done(cell))
    return f", about {format_duration(left)} left" if left else ""


def _more_seconds(cell: Cell, grid: Grid, results: Results) -> float:
    """About what is missing of a cell that is done takes; 0 when nothing is."""
    records = last_begun(results.of(cell))
    plans = [record for record in records if record["kind"] == "plan"]
    if not plans:
        return 0.0  # nothing fitted
    more = max(0, grid.profile_parts - len(plans)) * plans[-1]["seconds"]
    of = twins(plans[0]["wire"], plans[0]["auto"])
    return float(more + Epochs.of(records).seconds_to(grid.enough, of[plans[-1]["choices"]["auto"]]))


class _Bench:
    """Two tiers that are kept from cell to cell."""

    def __init__(self, bed: Bed, folder: Path, grid: Grid, results: Results, tell: Tell) -> None:
        self._bed, self._grid, self._results, self._tell = bed, grid, results, tell
        token = secrets.token_hex(16)
        samples = max(grid.profile_samples(bs) for bs in grid.batches)
        store = make_store(folder, samples, grid.image_size)
        # The paper's. One that is looked for while splits are compared would be another for each of them.
        fixed = ("--cos-batch", str(FIXED_BATCH))
        self._url = start_server(bed, store, token, folder, fixed, device=grid.server_device)
        self._client = BenchClient(bed, token, folder)
        self._open: tuple[str, int, Form] | None = None
        self._splits: list[int] = []
        self._warm: set[int] = set()

    def measure(self, cell: Cell) -> None:
        """Plan the cell and measure its splits; of one that is done, what is missing."""
        begun = last_begun(self._results.of(cell)) if self._results.done(cell) else []
        plans = [record for record in begun if record["kind"] == "plan"]
        self._opened(cell, "images")
        self._bed.set_bandwidth(cell.bandwidth)
        if not plans and not self._plan(cell, plans):
            return
        epochs, of = Epochs.of(begun), twins(plans[0]["wire"], plans[0]["auto"])
        if not begun:
            for split in sorted(set(of), key=lambda s: plans[0]["auto"][s]):
                self._run(cell, split, epochs, plans[0]["wire"][split])
        while len(plans) < self._grid.profile_parts:
            if not self._plan(cell, plans):
                return
        choices = {name: of[split] for name, split in plans[-1]["choices"].items()}
        self._compare(cell, choices, epochs)
        if not epochs.found:
            self._tell(f"{cell.key}: no split fitted the client's memory")
            return
        if not begun:
            for twin, measured in enumerate(of):
                if twin != measured:
                    self._results.add({"kind": "twin", "cell": cell.key, "split": twin, "of": measured})
            self._tensors(cell, self._grid.samples(cell.bs), TENSORS * epochs.best())
        summary = ", ".join(f"{name} {split} ({epochs.slower(split)})" for name, split in choices.items())
        best = f"best {epochs.best_split()} {epochs.best():.2f} s"
        self._tell(f"{cell.key} at {format_bandwidth(cell.bandwidth)}: {best}; {summary}")

    def _plan(self, cell: Cell, plans: list[dict[str, Any]]) -> bool:
        """Profile the cell once more, and choose from the mean of all its profiles; whether anything fits."""
        samples, profiled = self._grid.samples(cell.bs), self._grid.profile_samples(cell.bs)
        before = {"before": plans[-1]["profile"], "parts": len(plans)} if plans else {}
        planned = self._client.call("plan", samples=samples, profiled=profiled, epoch=0, **before)
        if not planned["ok"]:
            self._results.add({"kind": "unfit", "cell": cell.key, "error": planned["error"]})
            return False
        part = len(plans) + 1
        self._results.add({"kind": "plan", "cell": cell.key, "samples": samples, "part": part, **planned})
        plans.append(planned)
        return True

    def _compare(self, cell: Cell, choices: Mapping[str, int], epochs: Epochs) -> None:
        """Measure again what decides, until it is known well enough."""
        if not epochs.found or self._grid.repeats < 2:
            return
        for round_index in range(self._grid.repeats - 1):
            repeated = epochs.within(REPEAT_WITHIN[min(round_index, len(REPEAT_WITHIN) - 1)])
            repeated |= epochs.within(CHOSEN) & set(choices.values()) | epochs.found.keys() & {
                choices["auto"]
            }
            self._round(
                cell, {split for split in repeated if len(epochs.found[split]) < round_index + 2}, epochs
            )
        while repeated := epochs.unsure(choices["auto"], self._grid.enough):
            if not self._round(cell, repeated, epochs):
                return  # they do not fit any more

    def _round(self, cell: Cell, repeated: set[int], epochs: Epochs) -> bool:
        """These splits once more, and those that turn out to have been broken off too early; whether one was whole."""
        whole = [self._run(cell, split, epochs) for split in sorted(repeated)]
        whole += [self._run(cell, split, epochs) for split in epochs.doubtful(SURELY_BEYOND)]
        return any(whole)

    def _tensors(self, cell: Cell, samples: int, limit: float) -> None:
        """NoSplit with samples stored as tensors, as in the papers, beside that with encoded images."""
        forms: tuple[tuple[Form, int], ...] = (("uint8", 1), ("float32", 4))
        for form, element in forms:
            lower_bound = samples * 3 * self._grid.image_size**2 * element * 8 / cell.bandwidth
            if lower_bound > limit:
                over = {"ok": True, "over": True, "seconds": lower_bound, "by": "bytes at the link's rate"}
                self._results.add({"kind": "none", "cell": cell.key, "form": form, **over})
                continue
            self._opened(cell, form)
            self._bed.set_bandwidth(None)
            warmed = self._client.call("warm", split=0, samples=cell.bs)["ok"]
            self._bed.set_bandwidth(cell.bandwidth)
            if not warmed:
                self._results.add({"kind": "none", "cell": cell.key, "form": form, "ok": False})
                continue
            found = self._client.call("epoch", split=0, samples=samples, epoch=1, limit=limit)
            self._results.add({"kind": "none", "cell": cell.key, "form": form, **found})

    def _opened(self, cell: Cell, form: Form) -> None:
        if self._open == (cell.model, cell.bs, form):
            return
        self._bed.set_bandwidth(None)  # weights and warm-up are not what is measured
        opened = self._client.call(
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
            alternate="off",
        )
        self._open, self._splits, self._warm = (cell.model, cell.bs, form), opened["splits"], set()
        self._bed.set_bandwidth(cell.bandwidth)

    def _run(self, cell: Cell, split: int, epochs: Epochs, wire_bytes: int | None = None) -> bool:
        """One epoch at ``split``; with ``wire_bytes`` (an epoch's) only as much of it as shows that it is beyond.

        Whether it was whole.
        """
        bound = BEYOND * epochs.best() if epochs.found and wire_bytes is not None else None
        lower_bound = 0.0 if wire_bytes is None else wire_bytes * 8 / cell.bandwidth
        run: dict[str, Any] = {"kind": "run", "cell": cell.key, "split": split}
        if bound is not None and lower_bound > bound:
            run |= {
                "by": "bytes at the link's rate",
                "over": True,
                "seconds": lower_bound,
                "bytes": wire_bytes,
            }
        else:
            self._warmed(cell, split)
            samples = self._grid.samples(cell.bs)
            run |= self._client.call("epoch", split=split, samples=samples, epoch=1, limit=bound)
        self._results.add(run)
        epochs.note(run)
        return bool(run.get("ok") and not run["over"])

    def _warmed(self, cell: Cell, split: int) -> None:
        if split not in self._warm:
            self._bed.set_bandwidth(None)
            self._client.call("warm", split=split, samples=WARM * cell.bs)
            self._bed.set_bandwidth(cell.bandwidth)
            self._warm.add(split)


def twins(wire: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the split that is measured for each: itself, or the first of neighbours that differ in nothing."""
    of: list[int] = []
    for split in range(len(wire)):
        first = of[-1] if of else split
        merge_key = (
            wire[split] == wire[first] and abs(seconds[split] - seconds[first]) <= TWIN * seconds[first]
        )
        of.append(first if merge_key else split)
    return of


def sweep_conditions(grid: Grid) -> dict[str, Any]:
    """Return the conditions of a sweep's figures, beside the machine's own."""
    return {"grid": asdict(grid), "threads": "1 per tier", "data": "crops of scikit-learn's photographs"}
