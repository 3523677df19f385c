"""Requests at servers that work one by one, in simulated time: chosen and sent twice by the client's own rules."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hapi.client.transport.server_choice import Asked, ServerLoad, soonest
from hapi.client.transport.stragglers import Outstanding, Stragglers

SAMPLES = 8
Choice = Callable[[Sequence[ServerLoad], float, int], ServerLoad]
"""Chooses a server by the loads, the time and the number of requests before."""


def by_answer_time(loads: Sequence[ServerLoad], now: float, number: int) -> ServerLoad:
    return min(soonest(loads, 0, now, number), key=lambda load: load.until_free)


def by_flight(loads: Sequence[ServerLoad], now: float, number: int) -> ServerLoad:
    return min(loads, key=lambda load: load.in_flight)


def in_turn(loads: Sequence[ServerLoad], now: float, number: int) -> ServerLoad:
    return loads[number % len(loads)]


@dataclass(eq=False)
class Sent:
    """A request at one server."""

    request: Wanted
    place: int
    asked: Asked
    over: bool = False


@dataclass(eq=False)
class Wanted:
    """A request, and the servers that it was sent to."""

    at: float
    sent: list[Sent] = field(default_factory=list)
    answered: bool = False


class Fleet:
    """Servers, and a client that keeps ``window`` requests under way, or wants ``rate`` a second whatever comes."""

    def __init__(
        self,
        count: int,
        speed: Callable[[int, float], float],
        *,
        rate: float | None = None,
        window: int = 16,
        choose: Choice = by_answer_time,
        hedged: bool = True,
        noise: float = 0.1,
        seed: int = 1,
    ) -> None:
        """``speed(place, now)``: seconds for a request; ``noise``: their coefficient of variation."""
        self.loads = [ServerLoad() for _ in range(count)]
        self.stragglers = Stragglers()
        self.times: list[float] = []
        """Seconds of each answer."""
        self._speed, self._rate, self._window, self._choose = speed, rate, window, choose
        self._hedged, self._noise, self._random = hedged, noise, random.Random(seed)
        self._waiting: list[deque[Sent]] = [deque() for _ in range(count)]
        self._running: list[Sent | None] = [None] * count
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = self._chosen = 0
        for _ in range(1 if rate else window):
            self._later(0.0, self._want)

    def run(self, requests: int) -> Fleet:
        """Return when so many were answered."""
        while len(self.times) < requests:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self

    def percentile(self, share: float) -> float:
        times = sorted(self.times)
        return times[int(share * len(times))]

    @property
    def extra_share(self) -> float:
        """Requests that were sent twice over all."""
        return self.stragglers.extra / self.stragglers.sent

    def _later(self, at: float, event: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, event))

    def _want(self, now: float) -> None:
        if self._rate:
            self._later(now + self._random.expovariate(self._rate), self._want)
        request = Wanted(now)
        load = self._choose(self.loads, now, self._chosen)
        self.stragglers.sent += 1
        self._send(request, load, SAMPLES, now)
        if self._hedged:
            self._look(request, now)

    def _send(self, request: Wanted, load: ServerLoad, samples: int, now: float) -> None:
        self._chosen += 1
        load.begin(self._chosen)
        place = self.loads.index(load)
        request.sent.append(Sent(request, place, load.asked(0, samples, now)))
        self._waiting[place].append(request.sent[-1])
        self._work(place, now)

    def _work(self, place: int, now: float) -> None:
        """Let a server begin its next request, if it has none."""
        if self._running[place] is None and self._waiting[place]:
            sent = self._running[place] = self._waiting[place].popleft()
            seconds = self._speed(place, now) * max(0.1, self._random.gauss(1, self._noise))
            self._later(now + seconds, lambda at: self._done(sent, at))

    def _done(self, sent: Sent, now: float) -> None:
        if sent.over:
            return
        self._release(sent, now)
        self.loads[sent.place].answered(sent.asked, now)
        request = sent.request
        request.answered = True
        self.times.append(now - request.at)
        self.stragglers.answered(request.sent[0].asked, now - request.at)
        for other in request.sent:
            if not other.over:
                self._release(other, now)
                if other is request.sent[0]:
                    self.loads[other.place].outrun(other.asked, now)
        if not self._rate:
            self._want(now)

    def _release(self, sent: Sent, now: float) -> None:
        """Free the server: it is done, or the client has broken the connection."""
        sent.over = True
        self.loads[sent.place].end(now, sent.asked)
        if self._running[sent.place] is sent:
            self._running[sent.place] = None
        else:
            self._waiting[sent.place].remove(sent)
        self._work(sent.place, now)

    def _look(self, request: Wanted, now: float) -> None:
        if request.answered or len(request.sent) > 1:
            return
        (first,) = request.sent
        server = self.loads[first.place]
        others = [load for load in self.loads if load is not server]
        outstanding = Outstanding(first.asked, SAMPLES, now - request.at)
        usual = self.stragglers.longest_usual(first.asked) or 0.0
        begins = self.stragglers.straggles_from(first.asked, server) or 0.0
        found = self.stragglers.rescuer(outstanding, server, others, now)
        if found is None:
            pause = max(usual / 4, begins - outstanding.waited, 0.02)
            self._later(now + pause, lambda at: self._look(request, at))
        else:
            self.stragglers.extra += 1
            self._send(request, found, SAMPLES, now)
