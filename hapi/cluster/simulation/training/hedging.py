"""Hedged requests in simulated time, by the client's own rule (:mod:`hapi.client.transport.stragglers`).

A straggler's request is sent to a second server; the first whole answer wins, and the other is broken. The client's
thread looks at its requests now and then, where this wakes at the moment at which one straggles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import simpy

from hapi.client.transport.hedging import SHORTEST_PAUSE
from hapi.client.transport.server_choice import Asked
from hapi.client.transport.stragglers import Outstanding, Stragglers
from hapi.cluster.simulation.server import SimulatedRequest
from hapi.cluster.simulation.training.choice import KnownServer, KnownServers


class Missing(Protocol):
    """Samples of a request."""

    missing: int
    """Those that have not come."""


@dataclass(frozen=True, eq=False)
class Rescue:
    """A second server's whole answer."""

    request: SimulatedRequest
    asked: Asked
    nbytes: float


@dataclass(eq=False)
class Flight:
    """One attempt of a request at its first server."""

    part: Missing
    known: KnownServer
    asked: Asked
    process: simpy.Process
    """Waits for the answer."""
    send: Callable[[Flight, KnownServer, Asked], simpy.Process]
    """Sends what is missing to a second server."""
    arriving_before: float
    second: simpy.Process | None = None
    """Waits for a second server's."""
    rescue: Rescue | None = None
    over: bool = False


class SimulatedHedging:
    """Watches one trainer's requests."""

    def __init__(self, env: simpy.Environment, known: KnownServers, arriving: Callable[[], float]) -> None:
        """Watch none yet.

        Args:
            env: simulated time.
            known: servers of the trainer.
            arriving: seconds so far in which any answer was arriving.
        """
        self._env, self._known, self._arriving = env, known, arriving
        self._stragglers = Stragglers()
        self._unknown: list[Flight] = []
        """Those under way before it is known how long one takes."""

    def begin(
        self,
        part: Missing,
        known: KnownServer,
        asked: Asked,
        process: simpy.Process,
        send: Callable[[Flight, KnownServer, Asked], simpy.Process],
    ) -> Flight:
        """Watch an attempt that is made now, see :class:`Flight`."""
        flight = Flight(part, known, asked, process, send, self._arriving())
        self._stragglers.sent += 1
        self._watch(flight)
        return flight

    def end(self, flight: Flight, *, answered: bool) -> None:
        """Note that an attempt is over; ``answered``: whole, here or by the second server, which is broken off else."""
        flight.over = True
        if flight.second is not None and flight.rescue is None and flight.second.is_alive:
            flight.second.interrupt()
        if not answered:
            return
        self._stragglers.answered(flight.asked, self._outstanding(flight).waited)
        if self._unknown and self._stragglers.longest_usual(flight.asked) is not None:
            waiting, self._unknown = self._unknown, []
            for other in waiting:
                self._watch(other)

    def win(self, flight: Flight, rescue: Rescue) -> bool:
        """Take a second server's whole answer; False when the first one's attempt was over before."""
        if flight.over:
            return False
        flight.rescue = rescue
        flight.process.interrupt()
        return True

    def _outstanding(self, flight: Flight) -> Outstanding:
        arriving = self._arriving() - flight.arriving_before
        waited = max(0.0, self._env.now - flight.asked.at - arriving)
        return Outstanding(flight.asked, flight.part.missing, waited)

    def _watch(self, flight: Flight) -> None:
        begins = self._stragglers.straggles_from(flight.asked, flight.known)
        if begins is None:
            self._unknown.append(flight)
        else:
            self._wake(flight, begins - self._outstanding(flight).waited)

    def _wake(self, flight: Flight, seconds: float) -> None:
        timer = self._env.timeout(max(SHORTEST_PAUSE, seconds))
        timer.callbacks.append(lambda _: self._consider(flight))

    def _consider(self, flight: Flight) -> None:
        """Send a request to a second server if it straggles, else look again when it might."""
        usual = self._stragglers.longest_usual(flight.asked)
        begins = self._stragglers.straggles_from(flight.asked, flight.known)
        if flight.over or usual is None or begins is None:
            return
        outstanding, now = self._outstanding(flight), self._env.now
        if outstanding.waited < begins:
            self._wake(flight, begins - outstanding.waited)
            return
        others = self._known.others(flight.known, now)
        found = self._stragglers.rescuer(outstanding, flight.known, others, now)
        if found is None:
            self._wake(flight, usual / 4)
            return
        self._stragglers.extra += 1
        self._known.begin(found)
        flight.second = flight.send(flight, found, found.asked(flight.asked.kind, outstanding.missing, now))
