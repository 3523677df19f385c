"""Choice of the server whose answer is expected first: by requests in flight, and by the time that answers took.

A server that takes requests one by one answers the ``k``-th of them after ``k`` times its time for one, so that an
answer's seconds are divided by the requests that were in flight when it was asked. One that is silent for longer than
it used to take is as slow as its silence says, before it has answered. Prequal (Wydrowski et al., NSDI 2024) instead
asks the quickest of the servers that are not *hot*, that is, above a quantile of all requests in flight. Of the few
servers of a list the quickest is never above that: it would get everything.

Pure: it is told the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

FORGOTTEN = 0.3
"""Share of what a server's times go by that one answer replaces."""
AS_GOOD = 1.25
"""Servers that are expected to take at most so many times as long as the first count as equal."""
CROWDED = 3.0
"""Times as long as the first from which on a server is too crowded to be asked for what it keeps."""
DOUBT_SECONDS, DOUBT_REQUESTS = 10.0, 100
"""Seconds without a request, and requests that went elsewhere, in which half of what makes a server slower than the
quickest is forgotten: it is asked again then, and may have become quick. Both have to pass, so that a server ten times
as slow gets less than a hundredth of the requests, however few they are."""
NEW = 0.5
"""Share of the quickest server's time that one without an answer is expected to take: it is tried first."""


@dataclass(frozen=True)
class Asked:
    """A request when it was sent, for :meth:`ServerLoad.answered`."""

    kind: int
    samples: int
    at: float
    in_flight: int
    """Requests in flight at its server, with this one."""


@dataclass(eq=False, kw_only=True)
class ServerLoad:
    """One server's requests in flight, and how long its answers took."""

    in_flight: int = 0
    _idle_since: float = 0.0
    _chosen_before: int = 0
    """Requests to all servers when this one was asked last."""
    _seconds: dict[int, float] = field(default_factory=dict)
    _samples: dict[int, float] = field(default_factory=dict)
    """Sums over the last answers, by kind of request; older ones count less."""
    _outstanding: list[Asked] = field(default_factory=list)
    """Requests that are in flight, as far as their time counts."""

    def begin(self, chosen: int = 0) -> None:
        """Count a request in flight, the one of number ``chosen`` to any server; 0 where these are not counted."""
        self.in_flight += 1
        self._chosen_before = chosen

    def asked(self, kind: int, samples: int, now: float) -> Asked:
        """Return the note of a request that is sent now, and was counted already; :meth:`end` takes it."""
        found = Asked(kind, samples, now, self.in_flight)
        self._outstanding.append(found)
        return found

    def end(self, now: float, asked: Asked | None = None) -> None:
        """Count a request as over, the one of this note if it has one."""
        self.in_flight -= 1
        self._idle_since = now
        if asked is not None:
            self._outstanding.remove(asked)

    def answered(self, asked: Asked, now: float) -> None:
        """Learn from a whole answer."""
        self._learn(asked, now - asked.at)

    def outrun(self, asked: Asked, now: float) -> None:
        """Learn from an answer that another server's came before: it is taken to need twice as long."""
        seconds, known = 2 * (now - asked.at), self.sample_seconds(asked.kind)
        if known is None or seconds > known * asked.samples * asked.in_flight:
            self._learn(asked, seconds)

    def _learn(self, asked: Asked, seconds: float) -> None:
        if asked.samples < 1:
            return
        for sums, value in (
            (self._seconds, seconds / asked.in_flight),
            (self._samples, float(asked.samples)),
        ):
            sums[asked.kind] = (1 - FORGOTTEN) * sums.get(asked.kind, 0.0) + value

    def sample_seconds(self, kind: int) -> float | None:
        """Return the seconds for a sample of this kind when nothing else is in flight; None: not known yet."""
        return self._seconds[kind] / self._samples[kind] if kind in self._samples else None

    def overdue_seconds(self, kind: int, now: float) -> float:
        """Return the seconds for a sample that the silence of requests in flight proves, as if they were answered now;
        0 without any.
        """
        waited = (
            (now - asked.at) / (asked.samples * asked.in_flight)
            for asked in self._outstanding
            if asked.kind == kind and asked.samples > 0
        )
        return max(waited, default=0.0)

    @property
    def until_free(self) -> tuple[int, float]:
        """Order of equally quick servers, that which is free first before others: the requests in flight, and the time
        at which the oldest of them was sent.
        """
        return self.in_flight, min((asked.at for asked in self._outstanding), default=math.inf)

    def expected(self, kind: int, quickest: float, now: float, chosen: int) -> float:
        """Return the seconds in which a sample of another request would come.

        Args:
            kind: of request.
            quickest: seconds for a sample of the quickest server.
            now: monotonic time.
            chosen: requests to all servers so far.
        """
        known = self.sample_seconds(kind)
        excess = (NEW - 1) * quickest if known is None else known - quickest
        if known is not None and not self.in_flight:
            idle, elsewhere = now - self._idle_since, chosen - self._chosen_before
            excess *= 0.5 ** min(idle / DOUBT_SECONDS, elsewhere / DOUBT_REQUESTS)
        return max(quickest + excess, self.overdue_seconds(kind, now)) * (self.in_flight + 1)


Load = TypeVar("Load", bound=ServerLoad)


def soonest(
    servers: Sequence[Load], kind: int, now: float, chosen: int = 0, as_good: float = AS_GOOD
) -> list[Load]:
    """Return the servers that are expected to answer a request of ``kind`` first, all that are about equal.

    Args:
        servers: those that may be asked.
        kind: of request.
        now: monotonic time.
        chosen: requests to all servers so far, these and others; 0 where they are not counted.
        as_good: times as long as the first in which others count as equal.
    """
    known = [seconds for server in servers if (seconds := server.sample_seconds(kind)) is not None]
    quickest = min(known, default=1.0)
    expected = {id(server): server.expected(kind, quickest, now, chosen) for server in servers}
    smallest = min(expected.values())
    return [server for server in servers if expected[id(server)] <= as_good * smallest]
