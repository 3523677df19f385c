"""The rate of the links to the servers, measured on normal traffic."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice, takewhile

from hapi.client.transport.joint_rates import JointRates
from hapi.wire.frame_reader import HEAD_BYTES

RATE_SECONDS = 0.1
"""Longest stretch of arrivals that counts as one measurement of the link."""
RATES_KEPT = 4096
FOLLOWED_BYTES = 32 << 10
"""Bytes that must have followed the first ones of a stretch to tell its rate."""
RECENT = 8
"""Measurements that tell the rate just now."""


class LinkMeter:
    """The link's rate, measured on normal traffic. Thread-safe.

    From the beginning of a payload to its end the link is at work. The kernel tells the bytes that arrive
    meanwhile (``arrived``: bytes received so far on all connections). A payload that waits in the kernel's
    buffers for a busy reader would otherwise look faster than the link, and another connection's bytes share
    the link with it. Where the kernel does not tell, the bytes that were read count.

    The first bytes after a pause may come faster than the link goes on, since a token bucket or a buffer has
    filled up meanwhile. So the rate of a stretch is that of the bytes that followed, once they are enough.
    """

    def __init__(
        self,
        arrived: Callable[[], int | None],
        clock: Callable[[], float] | None = None,
        joint: JointRates | None = None,
    ) -> None:
        """Measure ``arrived()`` by ``clock``; what is learned of servers at once outlives the meter in ``joint``."""
        self._arrived, self._clock = arrived, clock or time.monotonic
        self._joint = joint or JointRates()
        self._lock = threading.Lock()
        self._active = 0
        self._sending = Counter[str]()
        """Payloads that are arriving, by server."""
        self._at_once: dict[int, float] = {}
        """Seconds by the number of servers whose payloads arrived."""
        self._marked: tuple[float, int | None] = (0.0, None)
        """Time of the last change of these servers, and the kernel's count then."""
        self._read = 0
        self._since = 0.0
        self._before: tuple[int | None, int] = (None, 0)
        self._paused = False
        """True when nothing was arriving before this stretch."""
        self._flowing: tuple[float, int] | None = None
        """Time at which the first bytes had arrived, and the kernel's count then."""
        self._rates: deque[tuple[float, int, float]] = deque(maxlen=RATES_KEPT)
        self._longest: deque[tuple[float, int, float]] = deque(maxlen=RATES_KEPT)
        self._ended: float | None = None
        self._idle = 0.0
        """Seconds between payloads, in which none was arriving."""

    def begin(self, server: str = "") -> None:
        """Note that a payload of ``server`` begins to arrive."""
        with self._lock:
            if not self._sending[server]:
                self._mark()
            self._sending[server] += 1
            self._active += 1
            if self._active == 1:
                self._open()
                self._paused = True
                if self._ended is not None:
                    self._idle += self._since - self._ended

    def flowing(self) -> None:
        """Note that the first bytes of a payload have arrived, and more are to come."""
        with self._lock:
            kernel = self._arrived()
            if self._active and self._paused and self._flowing is None and kernel is not None:
                self._flowing = (self._clock(), kernel)

    def end(self, nbytes: int, server: str = "") -> None:
        """Note that a payload of ``server`` has arrived, or never will; ``nbytes`` of it were read."""
        with self._lock:
            if self._sending[server] == 1:
                self._mark()
            self._sending[server] -= 1
            self._active -= 1
            self._read += nbytes
            now = self._clock()
            self._ended = now
            if self._active == 0 or now - self._since >= RATE_SECONDS:
                came, seconds = self._stretch(now)
                if came > 0 and seconds > 0:
                    self._rates.append((now, came, seconds))
                if self._active:
                    self._open()

    def rates(self, since: float = 0.0) -> list[tuple[int, float]]:
        """Return (bytes, seconds) of each stretch that ended after ``since`` (``time.monotonic``)."""
        with self._lock:
            return _since(self._rates, since)

    def recent(self) -> float | None:
        """Bytes per second over the newest stretches; None before the first."""
        with self._lock:
            newest = list(islice(reversed(self._rates), RECENT))
        seconds = sum(s for _, _, s in newest)
        return sum(n for _, n, _ in newest) / seconds if seconds else None

    def crossed(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes``, which did not exist before, have crossed in at most ``seconds``."""
        with self._lock:
            self._longest.append((self._clock(), nbytes, seconds))

    def bounds(self, since: float = 0.0) -> list[tuple[int, float]]:
        """Return (bytes, upper bound of their seconds) of each :meth:`crossed` after ``since``.

        A link that is faster than its readers shows in these only: its bytes are there before they look.
        """
        with self._lock:
            return _since(self._longest, since)

    def width(self, servers: int) -> int:
        """Return how many of so many servers fill the links when their answers arrive at once."""
        with self._lock:
            return self._joint.width(servers)

    def idle(self, width: int = 1) -> float:
        """Seconds since the first payload in which the links of ``width`` servers were idle, each for its part."""
        with self._lock:
            parts = (
                seconds * (1 - count / width) for count, seconds in self._at_once.items() if count < width
            )
            return self._idle + sum(parts)

    def _mark(self) -> None:
        """Account what has come since the last change of the servers whose payloads arrive."""
        (since, before), now, kernel = self._marked, self._clock(), self._arrived()
        self._marked = (now, kernel)
        sending = [server for server, payloads in self._sending.items() if payloads]
        if not sending:
            return
        self._at_once[len(sending)] = self._at_once.get(len(sending), 0.0) + now - since
        if before is not None and kernel is not None:
            self._joint.add(sending, kernel - before, now - since)

    def _open(self) -> None:
        self._since, self._before = self._clock(), (self._arrived(), self._read)
        self._paused, self._flowing = False, None

    def _stretch(self, now: float) -> tuple[int, float]:
        """Bytes of this stretch and their seconds, those of the first at the rate of what followed."""
        kernel = self._arrived()
        if self._flowing is not None and kernel is not None:
            since, then = self._flowing
            followed = kernel - then
            if followed >= FOLLOWED_BYTES:
                nbytes = HEAD_BYTES + followed
                return nbytes, nbytes * (now - since) / followed
        before, read = self._before
        # The kernel's count if it told then and tells now, else what was read.
        count = self._read - read if before is None or kernel is None else kernel - before
        return count, now - self._since


def _since(marks: deque[tuple[float, int, float]], since: float) -> list[tuple[int, float]]:
    """Bytes and seconds of those marks that are later than ``since``; they are in the order of time."""
    newest = list(takewhile(lambda mark: mark[0] > since, reversed(marks)))
    return [(nbytes, seconds) for _, nbytes, seconds in reversed(newest)]
