"""Limits of a server's connections: in all, from one address, and for connections that never ask.

A connection that never made an authorised request makes room when there is none; one that has made some keeps
its place while it is open. When all places are taken by such, a new one finds a small reserve, in which it
may ask for the server's health within a second; it is told to come back otherwise. There too the oldest makes
room.
"""

from __future__ import annotations

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
from hapi.server.lifecycle.event_loop import pause

FIRST_REQUEST_SECONDS = 10.0
"""Time for a connection's handshake and the head of its first request."""
HEALTH_RESERVE = 16
"""Connections beyond the limit that may ask for the server's health."""
HEALTH_SECONDS = 1.0
"""Time that each of them has."""
CLOSING_SECONDS = 0.5
"""Seconds that a new connection waits, unaccepted, for an ended one to be closed."""
SWEEP_SECONDS = 0.25
TOLD_SECONDS = 60.0
"""Fewest seconds between two reports of refused connections in the audit."""

REASONS = ("full", "address", "late", "replaced", "descriptors")
"""Reasons of refused or ended connections: no place in all, or for the address; no request in time; made room
for another one; no file descriptor.
"""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of the number of connections."""

    total: int
    per_address: int
    """Connections from one IPv4 address, or one IPv6 network of 64 bits."""
    reserve: int = HEALTH_RESERVE
    """Beyond ``total``, for health checks."""


class OpenConnection:
    """A server's record of one connection."""

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
        """True when the head of a request has come."""
        self.authorised = False
        """True when it has made an authorised request."""
        self.over = ""
        """The limit (of :data:`REASONS`) that it is beyond; empty for one that has a place."""
        self.ended: float | None = None
        """Time at which it was ended; it is open until the event loop has closed it."""
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
        """Let the event loop close it within its next turns."""
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
        self._open: dict[int, OpenConnection] = {}
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._ended: dict[OpenConnection, None] = {}
        self._waiting: dict[OpenConnection, None] = {}
        self._strangers: dict[OpenConnection, None] = {}
        self._strangers_of: dict[str, dict[OpenConnection, None]] = {}
        self._over: dict[OpenConnection, None] = {}
        self._reported: Counter[str] = Counter()
        self._reported_at = float("-inf")
        self._troublesome: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Connections that are open, in the reserve or not."""
        return len(self._open)

    # -- at the door -------------------------------------------------------------------------------------

    def awaits_closing(self) -> bool:
        """Return whether a new connection must wait until one that was ended is closed, which takes a moment."""
        if self.open < self.limits.total + self.limits.reserve or not self._ended:
            return False
        oldest = next(iter(self._ended)).ended
        return oldest is not None and self._clock() - oldest < CLOSING_SECONDS

    def admit(self, sock: socket.socket, address: str) -> OpenConnection | None:
        """Return the place of a connection accepted from ``address``; None: close it."""
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
        connection = OpenConnection(sock, network, self._clock())
        connection.over = reason
        weakref.finalize(sock, self.closed, connection).atexit = False
        self._open[connection.descriptor] = connection
        if reason:
            self._over[connection] = None
        else:
            self._held += 1
            self._held_by[network] += 1
            self._waiting[connection] = None
            self._strangers[connection] = None
            self._strangers_of.setdefault(network, {})[connection] = None
        return connection

    def refuse(self, reason: str, network: str = "") -> None:
        """Count a connection that was refused or ended."""
        self.refused[reason] += 1
        if network and (network in self._troublesome or len(self._troublesome) < 1000):
            self._troublesome[network] += 1

    def connection_of(self, descriptor: int) -> OpenConnection | None:
        """The place of the open connection with this descriptor."""
        return self._open.get(descriptor)

    # -- of one connection -------------------------------------------------------------------------------

    def asks(self, connection: OpenConnection) -> None:
        """Note that the head of a request has come."""
        connection.asked = True
        self._waiting.pop(connection, None)

    def authorise(self, connection: OpenConnection) -> None:
        """Note that it made an authorised request, so that it does not make room for others any more."""
        if not connection.authorised:
            connection.authorised = True
            self._forget(connection)

    def closed(self, connection: OpenConnection) -> None:
        """Note that its socket is closed, or lost; calling twice is the same."""
        if self._open.get(connection.descriptor) is connection:
            del self._open[connection.descriptor]
            self._leave(connection)
            self._ended.pop(connection, None)

    def _end(self, connection: OpenConnection, reason: str) -> None:
        self.refuse(reason, connection.network)
        self._leave(connection)
        self._ended[connection] = None
        connection.end(self._clock())

    def _end_over(self, connection: OpenConnection) -> None:
        """End one that was refused already."""
        self._leave(connection)
        self._ended[connection] = None
        connection.end(self._clock())

    def _leave(self, connection: OpenConnection) -> None:
        """Release its place."""
        self._over.pop(connection, None)
        self._forget(connection)
        if not connection.over and connection not in self._ended:
            self._held -= 1
            self._held_by[connection.network] -= 1
            if not self._held_by[connection.network]:
                del self._held_by[connection.network]

    def _forget(self, connection: OpenConnection) -> None:
        """Count it as a stranger no more."""
        self._waiting.pop(connection, None)
        self._strangers.pop(connection, None)
        of_network = self._strangers_of.get(connection.network)
        if of_network is not None:
            of_network.pop(connection, None)
            if not of_network:
                del self._strangers_of[connection.network]

    # -- from time to time -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End connections whose time is over, and tell the audit, until cancelled."""
        try:
            while True:
                with contextlib.suppress(MemoryError):  # the next sweep must come
                    self.sweep()
                    self.tell()
                await pause(SWEEP_SECONDS)
        finally:
            self.tell(at_once=True)

    def sweep(self) -> None:
        """End connections that have not asked in time."""
        now = self._clock()
        for group, seconds in ((self._waiting, FIRST_REQUEST_SECONDS), (self._over, HEALTH_SECONDS)):
            late = list(itertools.takewhile(lambda p, longest=seconds: now - p.since >= longest, group))  # type: ignore[misc]
            for connection in late:
                if connection.over:
                    self._end_over(connection)
                else:
                    self._end(connection, "late")

    def tell(self, *, at_once: bool = False) -> None:
        """Report refused connections to the audit, if the last report is a while ago."""
        now = self._clock()
        news = self.refused - self._reported
        if news and (at_once or now - self._reported_at >= TOLD_SECONDS):
            worst = self._troublesome.most_common(1)
            audit.refused(
                "connections", reasons=dict(news), open=self.open, most_from=worst[0][0] if worst else ""
            )
            self._reported, self._reported_at = self.refused.copy(), now
            self._troublesome.clear()


def network_of(address: str) -> str:
    """Return the unit that counts as one address: an IPv4 address, or the 64 bits of an IPv6 network."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)
