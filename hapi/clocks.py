"""Clocks for the reports: busy seconds, seconds per stage, and newly touched memory."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hapi.waiting import when_given_up

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
"""Scope of the counted page faults: the calling thread where the system (Linux) knows it, otherwise the
process.
"""


def new_pages() -> int:
    """Pages that were touched for the first time so far; the kernel clears each, which takes time."""
    return resource.getrusage(_THREAD).ru_minflt


class _Once:
    """Calls ``action`` the first time that it is called."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._left = [action]

    def __call__(self) -> None:
        with suppress(IndexError):
            self._left.pop()()


class BusyClock:
    """Wall seconds in which at least one piece of work was under way, however many ran side by side.

    That union is what a stage contributes to an epoch whose stages overlap; a plain sum over concurrent
    requests would count the same second several times. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark the work inside the ``with`` block as under way, until it is given up (:mod:`hapi.waiting`)."""
        ending = _Once(self.end)
        self.begin()
        try:
            with when_given_up(ending):
                yield
        finally:
            ending()

    def begin(self) -> None:
        """Count one more piece of work as under way."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1

    def end(self) -> None:
        """Count one piece of work less."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._total += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Busy seconds so far, work under way included."""
        with self._lock:
            return self._total + (time.monotonic() - self._since if self._running else 0.0)


class StageClock:
    """Sums of seconds per named stage: wall seconds, and CPU seconds of the threads that ran them.

    It also counts the pages that these threads touched for the first time. Thread-safe.
    """

    def __init__(self, stages: tuple[str, ...], total: StageClock | None = None) -> None:
        """Count the seconds of ``stages``, and add everything to ``total`` too."""
        self._total = total
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(stages, 0.0)
        self._cpu = dict.fromkeys(stages, 0.0)
        self._pages = dict.fromkeys(stages, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to ``name``."""
        start, cpu, pages = time.monotonic(), time.thread_time(), new_pages()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start, time.thread_time() - cpu, new_pages() - pages)

    def add(self, name: str, seconds: float, cpu_seconds: float = 0.0, pages: float = 0.0) -> None:
        """Add to a stage.

        Args:
            name: the stage.
            seconds: wall seconds.
            cpu_seconds: CPU seconds of its threads.
            pages: pages touched for the first time.
        """
        with self._lock:
            self._seconds[name] += seconds
            self._cpu[name] += cpu_seconds
            self._pages[name] += pages
        if self._total is not None:
            self._total.add(name, seconds, cpu_seconds, pages)

    def seconds(self) -> dict[str, float]:
        """Return a copy of the wall seconds so far, by stage."""
        with self._lock:
            return dict(self._seconds)

    def cpu_seconds(self) -> dict[str, float]:
        """Return a copy of the CPU seconds so far, by stage."""
        with self._lock:
            return dict(self._cpu)

    def pages(self) -> dict[str, float]:
        """Return a copy of the numbers of newly touched pages so far, by stage."""
        with self._lock:
            return dict(self._pages)
