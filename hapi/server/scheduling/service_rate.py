"""Seconds of cost that a server does in a second. Pure: it is told the time."""

from __future__ import annotations

FORGETTING = 0.95
"""Weight that earlier requests keep after a completed one: the rate is that of the last 20 or so."""
ENOUGH_COMPLETED = 8
"""Completed requests from which on the rate counts as measured."""


class ServiceRate:
    """Seconds of cost that the server does per second while every slot is taken. 1 until it was measured."""

    def __init__(self) -> None:
        self._cost = self._seconds = 1.0
        self._since: float | None = None
        self.completed = 0

    @property
    def per_second(self) -> float:
        """The rate of the last requests."""
        return self._cost / self._seconds

    def full(self, now: float) -> None:
        """Note that every slot is taken from now on."""
        self._since = now

    def done(self, cost: float, now: float) -> None:
        """Note that a request of ``cost`` ended when every slot was taken; one of them is free now."""
        elapsed = 0.0 if self._since is None else max(0.0, now - self._since)
        self._cost = FORGETTING * self._cost + cost
        self._seconds = max(FORGETTING * self._seconds + elapsed, 1e-9)
        self._since = None
        self.completed += 1
