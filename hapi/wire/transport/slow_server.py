"""The limits for a slow server's answer: the server's rule for slow readers, on this side.

A silence ends with a socket's timeout, but every byte that drips renews that. So an answer has three more
bounds. Its head and its trailer are small and must come whole. While it is on its way it must come at a
minimum rate. Its time in all is bounded by its bytes at that rate, plus a fixed time for the server's
computation.

Only the seconds count in which this side waits for bytes that the server has. Between two frames it computes,
and owes nothing.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass

from hapi.units import format_bytes, format_duration

LEAST_RATE, RATE_SECONDS = 1024, 30.0
"""Bytes a second, and over how many seconds: as ``hapi-server`` has it for its readers."""
LONGEST_ANSWER = 1800.0
"""Seconds of one answer, beside what its bytes take at the least rate."""
MOST_HEAD_BYTES = 64 << 10
"""Most bytes of an answer's head with all that comes before it (1xx), or of its trailer."""
MOST_WASTE_BYTES = 1 << 20
"""Most bytes beside as much again as the content: chunked encoding may carry anything between chunks."""
LOOKS = 4
"""Looks at an answer within the shortest time that may end it."""


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Requirements of an answer."""

    silence: float = 60.0
    """Longest time without a byte, and of a head from its first byte on, in seconds."""
    rate: int = LEAST_RATE
    """Bytes a second that it brings while it is on its way; 0: any."""
    window: float = RATE_SECONDS
    """Seconds of waiting over which that is measured."""
    longest: float = LONGEST_ANSWER
    """Seconds in all, beside what its bytes take at the least rate."""
    flag: str = " (--answer-timeout)"
    """The flag that sets ``longest``, as messages end with it; empty for none."""

    @classmethod
    def within(cls, seconds: float, flag: str = "") -> AnswerLimits:
        """Return the limits of a document that must be whole within ``seconds``, at whatever rate."""
        return cls(silence=seconds, rate=0, longest=seconds, flag=flag)


class SlowAnswerError(TimeoutError):
    """The answer is not waited for any longer."""


class EndlessHeadError(http.client.HTTPException):
    """The head of an answer has no end."""


class AnswerGuard:
    """Guard of one answer. Add to :attr:`waited` and :attr:`received`, and :meth:`check` when
    :attr:`next_look` has come.
    """

    def __init__(self, limits: AnswerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin when the request has been sent."""
        self._limits = limits
        self._clock = clock
        self._began = clock()
        self._interval = min(0.5, limits.silence / LOOKS, limits.window / LOOKS)
        self._content: Callable[[], int] | None = None
        self._bounded: int | None = 0
        """Bytes before the part that must be small, while that part is read."""
        self._bounded_at: float | None = None
        """Time at which its first byte came."""
        self._owed = False
        self._mark = (0.0, 0)
        """Seconds waited and bytes received where the window begins."""
        self._paused = 0.0
        """Seconds waited when the last frame had come."""
        self.waited = 0.0
        """Seconds spent waiting for bytes of this answer."""
        self.received = 0
        """Its bytes so far, those of HTTP included."""
        self.next_look = self._began
        """Time of the clock from which on the next read is followed by a look."""

    def document(self) -> None:
        """Note that the head is whole and a document follows, all of which is owed."""
        self._body()
        self.arriving(True)

    def frames(self, content: Callable[[], int]) -> None:
        """Note that the head is whole and frames follow; ``content()`` returns their bytes so far."""
        self._body()
        self._content = content

    def end(self) -> None:
        """Note that the content is whole; only the end of chunked encoding can follow."""
        self._bounded, self._bounded_at = self.received, self._clock()
        self.next_look = self._bounded_at

    def arriving(self, owed: bool) -> None:
        """Note whether the server has bytes to give: from the first byte of a frame to its last."""
        if owed and not self._owed:
            self._mark = (self._mark[0] + self.waited - self._paused, self._mark[1])
        self._paused = self.waited
        self._owed = owed

    def check(self) -> None:
        """Raise :class:`SlowAnswerError` or :class:`EndlessHeadError` for an answer beyond its limits."""
        now, limits = self._clock(), self._limits
        self.next_look = now + self._interval
        if self._bounded is not None:
            self._look_at_head(now)
        content = 0 if self._content is None else self._content()
        if now - self._began >= limits.longest + content / (limits.rate or LEAST_RATE):
            raise SlowAnswerError(
                f"an answer of {format_bytes(self.received)} so far has taken more than "
                f"{format_duration(limits.longest)}{limits.flag}"
            )
        if self._content is not None and self.received > 2 * content + MOST_WASTE_BYTES:
            raise EndlessHeadError(f"{self.received} bytes for {content} of content")
        if self._owed:
            self._look_at_rate()

    def _body(self) -> None:
        self._bounded = self._bounded_at = None
        self._mark, self._paused = (self.waited, self.received), self.waited

    def _look_at_head(self, now: float) -> None:
        part = self.received - (self._bounded or 0)
        if part > MOST_HEAD_BYTES:
            raise EndlessHeadError(f"more than {MOST_HEAD_BYTES} bytes beside its content")
        if self._bounded_at is None:
            self._bounded_at = now
        elif now - self._bounded_at >= self._limits.silence:
            raise SlowAnswerError(f"the head of an answer took more than {self._limits.silence:g} s to come")
        self.next_look = now

    def _look_at_rate(self) -> None:
        waited, before = self._mark
        seconds, came = self.waited - waited, self.received - before
        if seconds < self._limits.window:
            return
        if came < self._limits.rate * seconds:
            raise SlowAnswerError(
                f"an answer brought {came} bytes in {seconds:.0f} s, less than {self._limits.rate} a second "
                "(--slow-server-rate, --slow-server-seconds)"
            )
        self._mark = (self.waited, self.received)
