"""Times of requests: as early as the links need them, and no earlier.

Answers that come at the same time share the link, so that the first training batch comes as late as the
fourth. One answer after the other leaves the link idle while the server works on the next. So a request is
sent when the outstanding bytes would take the link no longer than an answer needs to begin. That *lead* is
learned: it grows by the time for which the link was idle although a request had been held back. If the server
or the trainer is the bottleneck, few bytes are outstanding, and as many requests are under way as allowed.

Several servers may have links of their own, or share one. The client learns how many of them fill the links together
(:mod:`hapi.client.transport.joint_rates`). While fewer requests are under way nothing is held back, and where
answers of fewer servers are arriving, a part of the links is idle. While requests wait for slots at servers, one answer
counts as enough: more under way would wait there, too, and those that share a link hold their slots for longer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from hapi.client.transport.link_meter import LinkMeter

LONGEST_LEAD = 10.0
"""Seconds."""
IDLE = 0.02
"""Share of an answer's time on the link for which the link may be idle before it."""
MAX_DELAY_FACTOR = 2.0
"""Times what all answers under way should take, after which no request is held back: a server may be silent."""
UNKNOWN = 2
"""Requests under way before the first answer has shown the link."""


@dataclass
class Learned:
    """A session's knowledge of its link, pass after pass."""

    rate: float | None = None
    """Bytes per second; None where all was there before anybody looked, so that there is nothing to wait for."""
    answered: bool = False
    """True when an answer has come."""
    lead: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, by split: how long a server needs depends on it."""
    wait: float = 0.0
    """Seconds for which the next request would wait for a slot, by the newest answer."""


class RequestPacer:
    """Paces the requests of one pass. Not thread-safe: the prefetcher's lock guards it."""

    def __init__(
        self,
        arrived: Callable[[], int | None],
        link: LinkMeter,
        learned: Learned,
        servers: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a pass.

        Args:
            arrived: returns the bytes that have come over the network so far; None where nobody can tell, nor pace
                then.
            link: the meter of the pass.
            learned: of the session.
            servers: returns the number of servers.
            clock: returns seconds.
        """
        self._arrived, self._link, self._learned, self._clock = arrived, link, learned, clock
        self._servers = servers
        self._coming: dict[object, float] = {}
        """Expected bytes of each answer under way."""
        self._expected = 0.0
        """Bytes in all since :attr:`_before`, as far as is known by now."""
        self._before: int | None = None
        self._idle_before = (1, link.idle())
        """Servers that fill the links, and these links' idle seconds, at the last answer's end."""
        self._held = False
        self._since: float | None = None
        """Time at which the next request was first held back."""

    def delay(self, split: int) -> float:
        """Return the seconds until the next request should be sent; 0: now."""
        arrived, under_way = self._arrived(), len(self._coming)
        width = self._width()
        if arrived is None or self._before is None or under_way < width:
            return 0.0
        if self._learned.rate is None:
            return 0.0 if self._learned.answered or under_way < UNKNOWN else 0.05
        whole, rate = sum(self._coming.values()), self._learned.rate
        to_come = min(whole, max(0.0, self._expected - (arrived - self._before)))
        # Answers over several links end one after the other: those after the first have half of it to come on average.
        to_come -= (width - 1) / 2 * whole / under_way
        delay = max(0.0, to_come / rate - self._learned.lead[split])
        if delay:
            now = self._clock()
            self._since = now if self._since is None else self._since
            delay = min(delay, max(0.0, self._since + MAX_DELAY_FACTOR * whole / rate - now))
        self._held |= delay > 0
        return delay

    def sent(self, request: object, nbytes: float) -> None:
        """Note that ``request`` is sent, with about ``nbytes`` expected for it."""
        if not self._coming:
            self._before, self._expected = self._arrived(), 0.0
        self._coming[request] = nbytes
        self._expected += nbytes
        self._since = None

    def done(self, request: object, split: int, nbytes: int | None) -> None:
        """Note that its answer has come, of ``nbytes`` in all; or that it failed (None)."""
        self._expected += (nbytes or 0) - self._coming.pop(request)
        if nbytes is None:
            return
        known = self._learned
        known.rate, known.answered = self._link.recent() or known.rate, True
        idle = self._idle()
        if self._held and known.rate is not None and idle > IDLE * nbytes / known.rate:
            known.lead[split] = min(LONGEST_LEAD, known.lead[split] + idle)
        self._held = False

    def waits(self, seconds: float) -> None:
        """Note for how long the next request would wait for a slot, by a server's answer."""
        self._learned.wait = seconds

    def _width(self) -> int:
        """Servers whose answers fill the links."""
        return 1 if self._learned.wait > 0 else self._link.width(self._servers())

    def _idle(self) -> float:
        """Idle seconds of the links since the last answer's end; 0 when it is new how many servers fill them."""
        width = self._width()
        (before, seconds), now = self._idle_before, self._link.idle(width)
        self._idle_before = (width, now)
        return now - seconds if width == before else 0.0
