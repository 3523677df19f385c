"""Clocks that the reports are made of: how long a thing was busy, and seconds per stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        """Mark the work inside the ``with`` block as under way."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1
        try:
            yield
        finally:
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
    """Seconds per named stage, summed. Thread-safe."""

    def __init__(self, stages: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(stages, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the ``with`` block to ``name``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to stage ``name``."""
        with self._lock:
            self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """A copy of the sums so far."""
        with self._lock:
            return dict(self._seconds)
