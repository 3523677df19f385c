"""Which connections a server holds: at most so many in all and from one address, and for those that ask for something.

A connection that never made an authorised request makes room when there is none; one that has made some keeps its
place while it is open. What comes when all places are taken by such finds a small reserve, in which it may ask for
the server's health within a second; it is told to come back otherwise. There too the oldest makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hapi.errors import ShortageError
from hapi.server.lifecycle import audit

FIRST_REQUEST_SECONDS = 10.0
"""Time for a connection's handshake and the head of its first request."""
HEALTH_RESERVE = 16
"""Connections beyond the limit that may ask for the server's health."""
HEALTH_SECONDS = 1.0
"""Time that each of them has."""
CLOSING_SECONDS = 0.5
"""How long a new connection waits, unaccepted, for one that was ended to be closed."""
SWEEP_SECONDS = 0.25
TOLD_SECONDS = 60.0
"""At most how often the audit tells of refused connections."""

REASONS = ("full", "address", "late", "replaced", "descriptors")
"""Why connections are refused or ended: no place in all, or for the address; no request in time; made room for
another one; no file descriptor."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be."""

    total: int
    per_address: int
    """From one IPv4 address, or one IPv6 network of 64 bits."""
    reserve: int = HEALTH_RESERVE
    """Beyond ``total``, for health checks."""


class Place:
    """What a server knows of one connection."""

    __slots__ = (
        "__weakref__",
        "_socket",
        "abort",
        "asked",
        "authorised",
        "descriptor",
        "ended",
        "network",
        "over",
        "since",
    )

    def __init__(self, sock: socket.socket, network: str, since: float) -> None:
        self._socket = weakref.ref(sock)
        self.descriptor = sock.fileno()
        self.network = network
        self.since = since
        self.asked = False
        """Whether the head of a request has come."""
        self.authorised = False
        """Whether it has made an authorised request."""
        self.over = ""
        """The limit (of :data:`REASONS`) that it is beyond; empty for one that has a place."""
        self.ended: float | None = None
        """When it was ended; it is open until the event loop has closed it."""
        self.abort: Callable[[], None] | None = None
        """Closes it at once; None until its protocol is there (during a TLS handshake)."""

    def check(self) -> None:
        """Refuse a request on a connection in the reserve, by :class:`ShortageError`."""
        if self.over:
            of_one = " from one address" if self.over == "address" else ""
            raise ShortageError(
                f"the server has as many connections{of_one} as it may; come back in 1 s, or ask another one",
                retry_after=1.0,
            )

    def end(self, now: float) -> None:
        """Have it closed within the next turns of the event loop."""
        self.ended = now
        sock = self._socket()
        if self.abort is not None:
            self.abort()
        elif sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Connections:
    """The connections of one server. For its event loop's thread only, but for the numbers."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        """Connections refused or ended so far, by :data:`REASONS`."""
        self._clock = clock
        self._places: dict[int, Place] = {}
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._ended: dict[Place, None] = {}
        self._waiting: dict[Place, None] = {}
        self._strangers: dict[Place, None] = {}
        self._strangers_of: dict[str, dict[Place, None]] = {}
        self._over: dict[Place, None] = {}
        self._told: Counter[str] = Counter()
        self._told_at = float("-inf")
        self._troublesome: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Connections that are open, in the reserve or not."""
        return len(self._places)

    # -- at the door -------------------------------------------------------------------------------------

    def awaits_closing(self) -> bool:
        """Whether a new connection must wait until one that was ended is closed, which takes a moment."""
        if self.open < self.limits.total + self.limits.reserve or not self._ended:
            return False
        oldest = next(iter(self._ended)).ended
        return oldest is not None and self._clock() - oldest < CLOSING_SECONDS

    def admit(self, sock: socket.socket, address: str) -> Place | None:
        """The place of a connection that was accepted from ``address``; None: close it."""
        network, limits = network_of(address), self.limits
        crowded = self._held_by[network] >= limits.per_address
        reason = "address" if crowded else "full" if self._held >= limits.total else ""
        if reason:
            others = self._strangers_of.get(network, {}) if crowded else self._strangers
            stranger = next(iter(others), None)
            if stranger is not None:
                self._end(stranger, "replaced")
                reason = ""
        if reason:
            self.refuse(reason, network)
            if len(self._over) >= limits.reserve:
                self._end_over(next(iter(self._over)))
        if self.open > limits.total + limits.reserve:  # those that were ended are not closed in time
            return None
        place = Place(sock, network, self._clock())
        place.over = reason
        self._places[place.descriptor] = place
        weakref.finalize(sock, self.closed, place).atexit = False
        if reason:
            self._over[place] = None
        else:
            self._held += 1
            self._held_by[network] += 1
            self._waiting[place] = None
            self._strangers[place] = None
            self._strangers_of.setdefault(network, {})[place] = None
        return place

    def refuse(self, reason: str, network: str = "") -> None:
        """Count a connection that was refused or ended."""
        self.refused[reason] += 1
        if network and (network in self._troublesome or len(self._troublesome) < 1000):
            self._troublesome[network] += 1

    def place_of(self, descriptor: int) -> Place | None:
        """The place of the open connection with this descriptor."""
        return self._places.get(descriptor)

    # -- of one connection -------------------------------------------------------------------------------

    def asks(self, place: Place) -> None:
        """The head of a request has come."""
        place.asked = True
        self._waiting.pop(place, None)

    def authorise(self, place: Place) -> None:
        """It made an authorised request, and does not make room for others any more."""
        if not place.authorised:
            place.authorised = True
            self._forget(place)

    def closed(self, place: Place) -> None:
        """Its socket is closed, or lost; telling it twice is the same."""
        if self._places.get(place.descriptor) is place:
            del self._places[place.descriptor]
            self._leave(place)
            self._ended.pop(place, None)

    def _end(self, place: Place, reason: str) -> None:
        self.refuse(reason, place.network)
        self._leave(place)
        self._ended[place] = None
        place.end(self._clock())

    def _end_over(self, place: Place) -> None:
        """End one that was refused already."""
        self._leave(place)
        self._ended[place] = None
        place.end(self._clock())

    def _leave(self, place: Place) -> None:
        """It holds no place any more."""
        self._over.pop(place, None)
        self._forget(place)
        if not place.over and place not in self._ended:
            self._held -= 1
            self._held_by[place.network] -= 1
            if not self._held_by[place.network]:
                del self._held_by[place.network]

    def _forget(self, place: Place) -> None:
        """It is no stranger any more."""
        self._waiting.pop(place, None)
        self._strangers.pop(place, None)
        of_network = self._strangers_of.get(place.network)
        if of_network is not None:
            of_network.pop(place, None)
            if not of_network:
                del self._strangers_of[place.network]

    # -- from time to time -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End connections whose time is over, and tell the audit, until cancelled."""
        try:
            while True:
                self.sweep()
                self.tell()
                await asyncio.sleep(SWEEP_SECONDS)
        finally:
            self.tell(at_once=True)

    def sweep(self) -> None:
        """End connections that have not asked in time."""
        now = self._clock()
        for places, seconds in ((self._waiting, FIRST_REQUEST_SECONDS), (self._over, HEALTH_SECONDS)):
            late = list(itertools.takewhile(lambda p, longest=seconds: now - p.since >= longest, places))  # type: ignore[misc]
            for place in late:
                if place.over:
                    self._end_over(place)
                else:
                    self._end(place, "late")

    def tell(self, *, at_once: bool = False) -> None:
        """Tell the audit what was refused since it was told last, if that is a while ago."""
        now = self._clock()
        news = self.refused - self._told
        if news and (at_once or now - self._told_at >= TOLD_SECONDS):
            most = self._troublesome.most_common(1)
            audit.refused(
                "connections", reasons=dict(news), open=self.open, most_from=most[0][0] if most else ""
            )
            self._told, self._told_at = self.refused.copy(), now
            self._troublesome.clear()


def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or the 64 bits of an IPv6 network."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)
