"""Events in simulated time, and pools of places that are served in turn. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Then = Callable[[], None]
"""Next step of a process, once what it waits for is over."""
SLICE_SECONDS, MOST_SLICES = 0.01, 4
"""Length of the turns that long work takes on processors, and into how many turns it is cut at most."""


class Clock:
    """Simulated seconds, and the events that are to come."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.now = 0.0
        self.halted = False
        """Set by an event to end :meth:`run`; the others stay."""
        self._events: list[tuple[float, int, Then]] = []
        self._number = 0

    def after(self, seconds: float, then: Then) -> None:
        """Let ``then`` come in ``seconds``; events of one moment come in the order of these calls."""
        self._number += 1
        heappush(self._events, (self.now + seconds, self._number, then))

    def run(self) -> None:
        """Let one event come after the other, until one halts the clock or none is left."""
        self.halted = False
        while self._events and not self.halted:
            self.now, _, then = heappop(self._events)
            then()


class Pool:
    """Places such as processors, or a disk's one arm, which are given in the order of the demands."""

    def __init__(self, clock: Clock, places: int = 1) -> None:
        """All ``places`` are free."""
        self.places = self._free = places
        self.busy_seconds = 0.0
        """Seconds that places were used for, added up."""
        self._clock = clock
        self._line: deque[tuple[int, Then]] = deque()

    @property
    def idle(self) -> bool:
        """True when nobody has a place or waits for one."""
        return self._free == self.places and not self._line

    def take(self, then: Then, width: int = 1) -> None:
        """Let ``then`` come as soon as ``width`` places are had; they are held until :meth:`give`."""
        self._line.append((min(width, self.places), then))
        self._serve()

    def give(self, width: int = 1) -> None:
        """Give places back."""
        self._free += min(width, self.places)
        self._serve()

    def use(self, seconds: float, then: Then, width: int = 1) -> None:
        """Hold ``width`` places for ``seconds``, then let ``then`` come."""

        def begun() -> None:
            """Hold them."""
            self.busy_seconds += seconds * min(width, self.places)
            self._clock.after(seconds, over)

        def over() -> None:
            """Give them back."""
            self.give(width)
            then()

        if seconds > 0:
            self.take(begun, width)
        else:
            then()

    def compute(self, seconds: float, then: Then, width: int = 1) -> None:
        """Do the same in turns, between which others have theirs, as an operating system's threads do."""
        count = min(MOST_SLICES, max(1, math.ceil(seconds / SLICE_SECONDS)))

        def turn_of(left: int) -> Then:
            """Return the step that follows when ``left`` turns are to come."""
            return then if not left else lambda: self.use(seconds / count, turn_of(left - 1), width)

        turn_of(count)()

    def _serve(self) -> None:
        while self._line and self._line[0][0] <= self._free:
            width, then = self._line.popleft()
            self._free -= width
            then()
