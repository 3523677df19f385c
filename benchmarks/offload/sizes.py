"""The part ``size``: the largest tail that trains under a bound of the memory (LoHan, Figure 6)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.offload.clients import Cap, TrainingClient, memory_cap
from benchmarks.offload.program import TrainTask
from benchmarks.offload.settings import ACTIVE, BLOCK_PARAMETERS, MEMORY, OFFLOADED, OffloadSettings
from benchmarks.testbed.cells import Results
from hapi.errors import HapiError, UsageError

Tell = Callable[[str], None]
_ROWS = 8
_STEPS = 2
_OWN_BYTES = 400_000_000
"""Bytes of Python and torch, which the memory that is given to Hapi does not count."""
_DISK_BYTES = 29
_LEAST_CAP = 600_000_000


def find_sizes(settings: OffloadSettings, folder: Path | None, results: Results, tell: Tell) -> None:
    """Find the largest tails of AdamW in memory and of Hapi, where ``results`` does not hold them.

    Args:
        settings: of the measurement; ``cap`` is the bound.
        folder: on the disk to be used; None for the temporary folder.
        results: file of records.
        tell: gets a line for each tail.

    Raises:
        UsageError: the bound is too small for torch alone.
    """
    if settings.cap < _LEAST_CAP:
        raise UsageError(f"--cap: a process with torch needs {_LEAST_CAP / 1e6:.0f} MB at least")
    done = {(r["cap"], r["way"]) for r in results.records if r["kind"] == "size"}
    for way in (MEMORY, ACTIVE):
        if (settings.cap, way) in done:
            continue
        with (
            memory_cap(int(settings.cap)) as cap,
            tempfile.TemporaryDirectory(prefix="hapi-offload-", dir=folder) as made,
        ):
            limit = int(0.9 * shutil.disk_usage(made).free / (_DISK_BYTES * BLOCK_PARAMETERS))
            trials = _Trials(way, cap, Path(made), settings, tell)
            largest = largest_that(trials.fits, limit)
            record = {"kind": "size", "way": way, "cap": settings.cap, "how": cap.how, "blocks": largest}
            results.add({**record, "parameters": largest * BLOCK_PARAMETERS, "trials": trials.found})


def largest_that(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` that ``fits``, 0 where none does: doubled, then halved."""
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class _Trials:
    """Trainings of tails of different sizes in one way."""

    def __init__(self, way: str, cap: Cap, folder: Path, settings: OffloadSettings, tell: Tell) -> None:
        self._way, self._cap, self._folder, self._settings, self._tell = way, cap, folder, settings, tell
        self.found: dict[int, str] = {}
        """Reason why a number of blocks does not train; empty where it does."""

    def fits(self, blocks: int) -> bool:
        """Return whether so many blocks train."""
        why = self.found[blocks] = self._why_not(blocks)
        self._tell(f"{self._way}, {blocks} blocks: {why or 'trains'}")
        return not why

    def _why_not(self, blocks: int) -> str:
        with tempfile.TemporaryDirectory(prefix="trial-", dir=self._folder) as own:
            states = Path(own) / "states"
            states.mkdir()
            task = TrainTask(
                way=self._way,
                blocks=blocks,
                rows=_ROWS,
                memory=int(self._settings.cap - _OWN_BYTES) if self._way in OFFLOADED else 0,
                folders=(str(states),),
            )
            client = TrainingClient(task, Path(own) / "log", self._settings.limit, self._cap)
            try:
                client.call(do="warm", steps=_STEPS)
            except HapiError as error:
                return str(error)
            finally:
                client.stop()
        return ""
