"""The part ``size``: the largest tail that trains under a bound of the memory (LoHan, Figures 6 and 8)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.offload.clients import Cap, TrainingClient, memory_cap
from benchmarks.offload.program import TrainTask
from benchmarks.offload.settings import (
    BLOCK_PARAMETERS,
    KEPT,
    OFFLOADED,
    ROW_BYTES,
    OffloadSettings,
    SizeCell,
)
from benchmarks.testbed.cells import Results
from hapi.errors import HapiError, UsageError

Tell = Callable[[str], None]
_STEPS = 2
_OWN_BYTES = 400_000_000
"""Bytes of Python and torch, which the memory that is given to Hapi does not count."""
_DISK_BYTES = 29
_LEAST_CAP = 600_000_000


def find_sizes(settings: OffloadSettings, folder: Path | None, results: Results, tell: Tell) -> None:
    """Find the largest tails of the part ``size``, where ``results`` does not hold them.

    Args:
        settings: of the measurement.
        folder: on the disk to be used; None for the temporary folder.
        results: file of records.
        tell: gets a line for each tail.

    Raises:
        UsageError: the bound is too small for torch alone.
    """
    if min(settings.caps) < _LEAST_CAP:
        raise UsageError(f"--cap: a process with torch needs {_LEAST_CAP / 1e6:.0f} MB at least")
    done = {(r["cap"], r["rows"], r["way"]) for r in results.records if r["kind"] == "size"}
    for cell in settings.size_cells():
        if (cell.cap, cell.rows, cell.way) in done:
            continue
        with (
            memory_cap(int(cell.cap)) as cap,
            tempfile.TemporaryDirectory(prefix="hapi-offload-", dir=folder) as made,
        ):
            room = 0.9 * shutil.disk_usage(made).free / _DISK_BYTES if cell.way in OFFLOADED else cell.cap
            limit = int(room / BLOCK_PARAMETERS)
            trials = _Trials(cell, cap, Path(made), settings, tell)
            largest = largest_that(trials.fits, limit, _guess(cell))
            if largest == limit:
                why = f"{limit} blocks, the most that the disk has room for, train in {cell.cap / 1e9:g} GB"
                results.add(
                    {"kind": "left out", "group": f"size/batch of {cell.rows}", "way": cell.way, "why": why}
                )
                continue
            record = {"kind": "size", **asdict(cell), "how": cap.how, "blocks": largest}
            results.add({**record, "parameters": largest * BLOCK_PARAMETERS, "trials": trials.found})


def _guess(cell: SizeCell) -> int:
    """Blocks that are tried first."""
    each = (4 if cell.way in OFFLOADED else 16) * BLOCK_PARAMETERS
    kept = cell.rows * ROW_BYTES if cell.way == KEPT or cell.way not in OFFLOADED else 0
    return int((cell.cap - _OWN_BYTES) / (each + kept))


def largest_that(fits: Callable[[int], bool], limit: int, guess: int = 1) -> int:
    """Return the largest number up to ``limit`` that ``fits``, 0 where none does.

    Steps from ``guess`` on double until one fits and one does not, and what lies between is halved.
    """
    good, bad = 0, limit + 1
    step = max(1, guess // 8)
    trial = max(1, guess)
    while bad - good > 1:
        trial = min(max(trial, good + 1), bad - 1)
        if fits(trial):
            good = trial
        else:
            bad = trial
        has_both = good > 0 and bad <= limit
        trial = (good + bad) // 2 if has_both else good + step if good else bad - step
        step *= 2
    return good


class _Trials:
    """Trainings of tails of different sizes in one way."""

    def __init__(self, cell: SizeCell, cap: Cap, folder: Path, settings: OffloadSettings, tell: Tell) -> None:
        self._cell, self._cap, self._folder, self._tell = cell, cap, folder, tell
        self._limit, self._threads = settings.limit, settings.threads
        self.found: dict[int, str] = {}
        """Reason why a number of blocks does not train; empty where it does."""

    def fits(self, blocks: int) -> bool:
        """Return whether so many blocks train."""
        why = self.found[blocks] = self._why_not(blocks)
        cell = self._cell
        where = f"{cell.way} in {cell.cap / 1e9:g} GB, batch of {cell.rows}"
        self._tell(f"{where}: {blocks} blocks: {why or 'trains'}")
        return not why

    def _why_not(self, blocks: int) -> str:
        with tempfile.TemporaryDirectory(prefix="trial-", dir=self._folder) as own:
            states = Path(own) / "states"
            states.mkdir()
            task = TrainTask(
                way=self._cell.way,
                blocks=blocks,
                rows=self._cell.rows,
                memory=int(self._cell.cap - _OWN_BYTES) if self._cell.way in OFFLOADED else 0,
                folders=(str(states),),
            )
            client = TrainingClient(task, Path(own) / "log", self._limit, self._threads, self._cap)
            try:
                client.call(do="warm", steps=_STEPS)
            except HapiError as error:
                return str(error)
            finally:
                client.stop()
        return ""
