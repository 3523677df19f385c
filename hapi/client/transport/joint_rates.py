"""Whether the links of several servers are their own: rates of answers that arrive at the same time.

Answers of servers with links of their own bring together what each of them brings alone. Where they share a link they
bring no more than one. What they bring over what they would bring alone, times their number, is the number of servers
whose answers fill the links.

Pure: it is told bytes and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

KEPT_SECONDS = 5.0
"""Seconds of arrivals that a rate is the mean of, about: older ones count less."""
ENOUGH_SECONDS, ENOUGH_BYTES = 0.1, 256 << 10
"""Seconds and bytes of arrivals that tell a rate: the first bytes after a pause may come faster than the link goes on.
"""
FORGOTTEN_SECONDS = 60.0
"""Seconds of arrivals after which the rate of several servers at once is measured anew."""
OWN_SHARE = 0.75
"""Part of what each server brings alone above which links count as their own."""
ROUNDED_AWAY = 0.25
"""Part of a server's link that is not worth a request of its own."""


class _Rate:
    """Bytes over seconds, in which older parts count less."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0
        self.taking_part: dict[str, float] = {}
        """Seconds of each server whose answers they were."""
        self.at = 0.0
        """Seconds of any arrivals by its newest part."""

    def add(self, servers: Collection[str], nbytes: float, seconds: float, at: float) -> None:
        kept = math.exp(-seconds / KEPT_SECONDS)
        self._nbytes = kept * self._nbytes + nbytes
        self._seconds = kept * self._seconds + seconds
        self.taking_part = {server: kept * before for server, before in self.taking_part.items()}
        for server in servers:
            self.taking_part[server] = self.taking_part.get(server, 0.0) + seconds
        self.at = at

    @property
    def value(self) -> float | None:
        """Bytes per second; None while it tells nothing."""
        enough = self._seconds >= ENOUGH_SECONDS and self._nbytes >= ENOUGH_BYTES
        return self._nbytes / self._seconds if enough else None

    def over(self, rates: Mapping[str, float], usual: float) -> float:
        """Return the bytes over those that servers with these rates would have brought; ``usual`` for others."""
        expected = sum(seconds * rates.get(server, usual) for server, seconds in self.taking_part.items())
        return self._nbytes / expected


class JointRates:
    """Rates of single servers, and of several at once. Not thread-safe: the lock of the link's meter guards it."""

    def __init__(self) -> None:
        self._alone: dict[str, _Rate] = {}
        """By server: while no other one's answers arrived."""
        self._together: dict[int, _Rate] = {}
        """By number of servers."""
        self._seconds = 0.0

    def add(self, servers: Collection[str], nbytes: float, seconds: float) -> None:
        """Note what has come while answers of ``servers`` were arriving.

        Args:
            servers: names of one or more.
            nbytes: of all their answers.
            seconds: for which these servers' answers, and no others', were arriving.
        """
        if seconds <= 0 or nbytes < 0:
            return
        self._seconds += seconds
        if len(servers) == 1:
            rate = self._alone.setdefault(next(iter(servers)), _Rate())
        else:
            rate = self._together.setdefault(len(servers), _Rate())
        rate.add(servers, nbytes, seconds, self._seconds)

    def width(self, servers: int) -> int:
        """Return how many servers' answers at once fill the links, as far as is known.

        That is one until a server was alone, since it is measured by that, and then twice as many as have answered at
        once over links of their own. A server that was never alone counts as the others.

        Args:
            servers: number of all servers.
        """
        alone = {server: value for server, rate in self._alone.items() if (value := rate.value) is not None}
        if servers == 1 or not alone:
            return 1
        usual = sum(alone.values()) / len(alone)
        known = {
            count: count * rate.over(alone, usual)
            for count, rate in self._together.items()
            if rate.value is not None and self._seconds - rate.at < FORGOTTEN_SECONDS
        }
        largest = max(known, default=1)
        if known.get(largest, 1.0) > OWN_SHARE * largest:
            return min(servers, 2 * largest)
        return min(servers, max(1, math.ceil(max(known.values()) - ROUNDED_AWAY)))
