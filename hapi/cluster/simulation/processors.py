"""Processors of one machine, shared evenly by all work on them, as an operating system does it."""

from __future__ import annotations

from heapq import heappop, heappush

import simpy

_SMALLEST_SECONDS = 1e-9
"""Seconds that are rounding: work of which less is left is over."""


class Processors:
    """Egalitarian processor sharing: work of ``n`` threads on ``c`` cores proceeds at ``min(1, c / n)`` of its speed.

    Exact, by virtual time: what is under way advances at one common rate, so that the order of the ends never changes.
    """

    def __init__(self, env: simpy.Environment, cores: float) -> None:
        """Lend ``cores``, of which a part may be a part of a core."""
        self.cores = cores
        self._env = env
        self._virtual = self._since = self._used = 0.0
        self._threads = self._busy = 0.0
        self._rate = 1.0
        """Seconds of work by the second of each thread."""
        self._ends: list[tuple[float, int, float, simpy.Event]] = []
        self._number = 0
        self._timer, self._due_at = 0, float("inf")

    @property
    def used(self) -> float:
        """Core seconds of work so far."""
        self._advance()
        return self._used

    def work(self, seconds: float, threads: float = 1.0) -> simpy.Event:
        """Return an event that comes when this work is done.

        Args:
            seconds: that it takes when nothing else runs.
            threads: cores that it keeps busy meanwhile.
        """
        done = self._env.event()
        if seconds <= 0:
            return done.succeed()
        self._advance()
        self._number += 1
        heappush(self._ends, (self._virtual + seconds, self._number, threads, done))
        self._use(self._threads + threads)
        self._arm()
        return done

    def _use(self, threads: float) -> None:
        self._threads, self._busy = threads, min(threads, self.cores)
        self._rate = self._busy / threads if threads else 1.0

    def _advance(self) -> None:
        now = self._env.now
        elapsed, self._since = now - self._since, now
        if elapsed > 0:
            self._virtual += elapsed * self._rate
            self._used += elapsed * self._busy

    def _arm(self) -> None:
        """Wake at the next end; a timer that is early finds that there is none yet."""
        delay = max(0.0, (self._ends[0][0] - self._virtual) / self._rate)
        at = self._since + delay
        if at < self._due_at:
            self._timer += 1
            timer, self._due_at = self._timer, at
            self._env.timeout(delay).callbacks.append(lambda _: self._due(timer))

    def _due(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._due_at = float("inf")
        self._advance()
        ends, threads = self._ends, self._threads
        # Rounding must not put an end off for ever.
        reached = self._virtual + self._rate * _SMALLEST_SECONDS
        while ends and ends[0][0] <= reached:
            _, _, own, done = heappop(ends)
            threads -= own
            done.succeed()
        if ends:
            self._use(threads)
            self._arm()
        else:
            self._use(0.0)  # no dust from adding and subtracting
