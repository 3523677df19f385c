"""The choice of a server for each request, by the client's own rules, for lists of thousands of servers.

Servers that were never asked are expected to answer equally soon, and none of their requests is in flight. So only the
first of them can be chosen: the others are in an order, and not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hapi.client.transport.server_choice import ServerLoad, soonest
from hapi.client.transport.server_pool import FIRST_PAUSE, LONGEST_PAUSE
from hapi.client.transport.told_waits import MOST_ASKED
from hapi.cluster.simulation.server import SimulatedServer
from hapi.errors import HapiError, TransportError
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.rendezvous import ranking


@dataclass(eq=False, kw_only=True)
class KnownServer(ServerLoad):
    """A server as one trainer knows it."""

    server: SimulatedServer
    number: int
    """Its number in the trainer's list."""
    place: int
    """Its number in the order of the content's providers."""
    failures: int = 0
    well_at: float = 0.0
    """Time before which it is left alone."""
    absent: bool = False
    """True since it could not be reached, until it is found again."""

    def failed(self, error: HapiError, now: float, factor: float) -> None:
        """Leave it alone for a while.

        Args:
            error: its failure.
            now: present time.
            factor: of the pause, by chance.
        """
        self.failures += 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(16, self.failures - 1))
        if error.retry_after is not None:
            pause = min(60.0, max(pause, error.retry_after))
        self.well_at = now + pause * factor
        self.absent = self.absent or isinstance(error, TransportError)

    def is_there(self, now: float) -> bool:
        """Return whether requests may go to it; an absent one is asked when its pause is over, as the client does."""
        if self.absent and self.well_at <= now:
            self.absent = not self.server.alive
            if self.absent:
                self.failures += 1
                self.well_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(16, self.failures - 1))
        return not self.absent


@dataclass(frozen=True, eq=False)
class ServerList:
    """Servers in the order of a trainer's list, and in that of a content's providers; shared by equal trainers."""

    servers: Sequence[SimulatedServer]
    ranked: Sequence[int]
    """Numbers of the servers, by their places."""
    places: Sequence[int]
    """Place of each server."""

    @classmethod
    def of(cls, servers: Sequence[SimulatedServer], content: str) -> ServerList:
        """Rank ``servers`` as providers of ``content``."""
        numbers = {server.name: number for number, server in enumerate(servers)}
        ranked = [numbers[name] for name in ranking(numbers, content)]
        places = [0] * len(servers)
        for place, number in enumerate(ranked):
            places[number] = place
        return cls(servers, ranked, places)


class KnownServers:
    """Servers that one trainer knows."""

    def __init__(self, listed: ServerList) -> None:
        """Know ``listed``, of which none was asked yet."""
        self._listed = listed
        self._asked: dict[int, KnownServer] = {}
        self._next = {False: 0, True: 0}
        """Where the servers that were never asked begin: in the list, and in the order of the providers."""
        self._chosen = 0

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self._listed.servers)

    def choose(self, split: int, tried: Collection[int], now: float) -> KnownServer | None:
        """Return the server that is expected to answer first, with a request counted; None when none is well.

        Args:
            split: of the request.
            tried: numbers of the servers that failed it.
            now: present time.
        """
        several = self.count > 1  # the only one is asked by requests themselves
        present = [known for known in self._asked.values() if not several or known.is_there(now)]
        well = [known for known in present if known.well_at <= now]
        fresh = [known for known in well if known.number not in tried] if tried else well
        new = self._first_new(providers=split > 0)
        if new is not None:
            fresh = [*fresh, new]
        fresh = fresh or well
        if not fresh:
            return None
        chosen = self.best(fresh, split, now)
        self._asked[chosen.number] = chosen
        self.begin(chosen)
        return chosen

    def best(self, servers: Sequence[KnownServer], split: int, now: float) -> KnownServer:
        """Return the one of ``servers`` that is expected to answer first, as the client chooses."""
        soon = soonest(servers, split, now, self._chosen)
        # The client takes the first of its list where nothing else tells them apart.
        return min(soon, key=lambda k: (k.until_free, k.place if split else 0, k.number))

    def begin(self, known: KnownServer) -> None:
        """Count a request to a server that was asked before, or is asked now."""
        self._chosen += 1
        known.begin(self._chosen)

    def others(self, known: KnownServer, now: float) -> list[KnownServer]:
        """Return the servers that were asked before and are well, but for ``known``."""
        others = (other for other in self._asked.values() if other is not known)
        return [other for other in others if other.well_at <= now and not other.absent]

    def told_waits(self, tenant: Tenant) -> list[float]:
        """Return the wait that servers tell a new job of ``tenant`` now, as far as the client asks them."""
        asked = self._listed.servers[:MOST_ASKED]
        return [server.admission.queue.lasting_wait(tenant) for server in asked if server.alive]

    def well_at(self) -> float:
        """Return the time at which the next server is well, or asked whether it is back, when all were asked."""
        return min(known.well_at for known in self._asked.values())

    def _first_new(self, *, providers: bool) -> KnownServer | None:
        """The first server that was never asked, in one of both orders."""
        listed, place = self._listed, self._next[providers]
        while place < len(listed.servers):
            number = listed.ranked[place] if providers else place
            if number not in self._asked:
                self._next[providers] = place
                return KnownServer(server=listed.servers[number], number=number, place=listed.places[number])
            place += 1
        self._next[providers] = place
        return None
