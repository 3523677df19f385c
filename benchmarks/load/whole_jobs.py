"""All-in-the-store, for comparison: whole training jobs beside the store (earlier HAPI text, sections 4.1 and
5.5).

Each job is ``hapi-train --store STORE --split none`` on the storage machine: all layers run in the job's own
process, on the storage tier's cores, and only samples come from a server there. A whole job needs its memory
as long as it runs, so jobs begin in their order, and only when they fit the device-memory budget beside those
that run.

A job's need is the memory that one was seen to take for a training batch. On a CPU the device's memory is the
process's anonymous memory, less that before the model was opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.testbed.background import Background
from benchmarks.testbed.tiers import BenchClient
from hapi.errors import HapiError
from hapi.units import format_bytes

EVERY_SECONDS = 0.1


class MemoryGate:
    """Jobs in their order, as many at a time as fit the budget. Thread-safe."""

    def __init__(self, budget: int) -> None:
        """``budget`` in bytes."""
        self._budget = budget
        self._changed = threading.Condition()
        self._next = 0
        self._used = 0

    @contextmanager
    def job(self, number: int, nbytes: int) -> Iterator[None]:
        """Hold memory for job ``number`` (0, 1, ...) inside the block, after all before it have had theirs.

        A job with a number must come here, since later ones wait for it. More than the budget is not waited
        for; the caller checks first.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._next == number and (not self._used or self._used + nbytes <= self._budget)
            )
            self._next += 1
            self._used += nbytes
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


class WholeJob:
    """One tenant's job in a process of its own."""

    def __init__(self, client: BenchClient, settings: Mapping[str, Any]) -> None:
        """``settings``: of the training run."""
        self._client, self._settings = client, settings
        client.call("ready")
        self._before = client.memory("RssAnon")
        self.running = False

    def observe(self, samples: int) -> int:
        """Bytes that a job takes: the peak of a training batch of ``samples``."""
        self._client.call("open", **self._settings)
        self._client.call("epoch", split=0, samples=samples, epoch=1, limit=None)
        peak = self._client.memory("VmHWM") - self._client.memory("RssFile") - self._before
        self._client.call("close")
        return max(1, peak)

    def run(self, samples: int) -> float:
        """The whole job; the seconds of opening its model."""
        self.running = True
        try:
            began = time.monotonic()
            self._client.call("open", **self._settings)
            opening = time.monotonic() - began
            self._client.call("epoch", split=0, samples=samples, epoch=1, limit=None)
            self._client.call("close")
            return opening
        finally:
            self.running = False

    @property
    def used_bytes(self) -> int:
        """Present bytes; 0 when it does not run."""
        return max(0, self._client.memory("RssAnon") - self._before) if self.running else 0


def run_whole_jobs(
    jobs: Sequence[WholeJob], needs: Sequence[int], budget: int, samples: int
) -> dict[str, Any]:
    """All ``jobs``, asked for at once; ``needs``: bytes of each. A record of the run."""
    gate, began = MemoryGate(budget), time.monotonic()

    def one(number: int) -> tuple[float, float, str]:
        """Run one job once its memory is free."""
        need = needs[number]
        if need > budget:
            with gate.job(number, 0):
                return 0.0, 0.0, f"needs {format_bytes(need)}, the budget is {format_bytes(budget)}"
        try:
            with gate.job(number, need):
                opening = jobs[number].run(samples)
        except HapiError as error:
            return 0.0, 0.0, str(error)
        return time.monotonic() - began, opening, ""

    with _Sampled(jobs) as sampled, ThreadPoolExecutor(len(jobs)) as threads:
        found = list(threads.map(one, range(len(jobs))))
    return {
        "seconds": [round(seconds, 4) for seconds, _, error in found if not error],
        "opening": [round(opening, 4) for _, opening, error in found if not error],
        "errors": [error for _, _, error in found if error],
        "memory": [(round(at - began, 3), used) for at, used in sampled.seen],
    }


class _Sampled(Background):
    """Memory of all running jobs."""

    def __init__(self, jobs: Sequence[WholeJob]) -> None:
        super().__init__(EVERY_SECONDS)
        self._jobs = jobs
        self.seen: list[tuple[float, int]] = []

    def step(self) -> None:
        self.seen.append((time.monotonic(), sum(job.used_bytes for job in self._jobs)))
