"""The limits for a slow reader of an answer. Pure: it is told the time, and the bytes taken.

Only bytes that the reader's side has acknowledged count as taken, not those that the server has handed over:
the buffers on the way swallow megabytes at once, and TLS's give them back in pieces of a megabyte, a minute
and a half of a link of 100 kbit/s.

Only the seconds in which the server waits for the reader count. Bytes taken while the server computed are to
the reader's credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Reason = Literal["silent", "slow", "late"]
REASONS: tuple[Reason, ...] = ("silent", "slow", "late")
"""Reasons for dropping a reader: it took nothing; too little while others waited; its request took too long
in all.
"""
MARKS = 16
"""Moments of the window that are remembered; it is that much longer at most."""
LOOKS = 4
"""Looks at a reader within the shortest time that may end it."""
LONGEST_LOOK = 0.5
"""Most seconds between two looks at a reader, and so the most for which a slow one keeps a slot that others want."""


class DroppedReaderError(TimeoutError):
    """The reader has lost its slot."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


@dataclass(frozen=True, kw_only=True)
class PaceLimits:
    """Requirements on a reader."""

    silence: float
    """Longest time without a byte, in seconds."""
    rate: int
    """Bytes per second that it must take while others wait for a slot or for memory; 0: any."""
    window: float
    """Seconds over which that is measured."""


class SlowReaderGuard:
    """Guard of one reader. Call :meth:`waited` after each wait for it, and :meth:`check` as soon as that asks
    for it.
    """

    def __init__(self, limits: PaceLimits, deadline: float, wanted: Callable[[], bool]) -> None:
        """``deadline``: when the request must be over; ``wanted``: whether somebody could use the slot now, or the
        device's memory that goes with it."""
        self._limits = limits
        self._deadline = deadline
        self._wanted = wanted
        self._waited = 0.0
        """Seconds that the server has waited for this reader."""
        self._next_check = 0.0
        self._taken = 0
        self._taken_at = 0.0
        """Bytes taken at the last look, and the time (in waited seconds) at which they last grew."""
        self._marks = deque([(0.0, 0)])
        """(waited seconds, bytes taken), the first one a window ago."""
        self.interval = min(LONGEST_LOOK, limits.silence / LOOKS, limits.window / LOOKS)
        """Longest wait before the next look, in seconds."""

    def waited(self, since: float, now: float) -> bool:
        """The server has waited for the reader from ``since`` to ``now``. Whether it is time for a look."""
        self._waited += now - since
        return self._waited >= self._next_check or now >= self._deadline

    def check(self, now: float, taken: int) -> None:
        """The reader has taken ``taken`` bytes so far; raises :class:`DroppedReaderError` when it loses its slot."""
        self._next_check = self._waited + self.interval
        if taken > self._taken:
            self._taken, self._taken_at = taken, self._waited
        self._remember()
        silent = self._waited - self._taken_at
        if silent >= self._limits.silence:
            raise DroppedReaderError("silent", f"the reader took nothing for {silent:.0f} s")
        if now >= self._deadline:
            raise DroppedReaderError("late", "the request took too long in all")
        if self._is_slow() and self._wanted():
            seconds, taken = self._in_window()
            raise DroppedReaderError(
                "slow", f"the reader took {taken} bytes in {seconds:.0f} s while others wait"
            )

    def _remember(self) -> None:
        marks, window = self._marks, self._limits.window
        if self._waited - marks[-1][0] >= window / MARKS:
            marks.append((self._waited, self._taken))
        while len(marks) > 1 and self._waited - marks[1][0] >= window:
            marks.popleft()

    def _in_window(self) -> tuple[float, int]:
        """The last window's seconds, and the bytes that were taken in it."""
        since, before = self._marks[0]
        return self._waited - since, self._taken - before

    def _is_slow(self) -> bool:
        seconds, taken = self._in_window()
        return seconds >= self._limits.window and taken < self._limits.rate * seconds
