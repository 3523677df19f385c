"""Hedged requests: a straggler's request is sent to a second server, the first whole answer wins, the other is broken.

A thread of its own watches the requests under way. A second request has a thread of its own, too, and keeps its answer
apart: the thread of the first request takes it into its place once its own was broken, so that one thread alone ever
writes there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hapi.client.transport.server_choice import Asked, ServerLoad
from hapi.client.transport.stragglers import Outstanding
from hapi.errors import HapiError
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation

T = TypeVar("T")
log = logging.getLogger("hapi.client")

LONGEST_PAUSE, SHORTEST_PAUSE = 0.25, 0.005
"""Seconds between two looks at the requests under way."""
SPARE_SECONDS = 10.0
"""Seconds without a request after which the thread that watches ends."""


class ArrivingSeconds:
    """Seconds in which any answer was arriving, as a link delays all. Thread-safe.

    An answer that has begun and stands still is not arriving, however long it does: between two calls in which no byte
    came nothing counts.
    """

    def __init__(self, begun: Callable[[], float], received: Callable[[], int | None]) -> None:
        """Count from now on.

        Args:
            begun: seconds so far in which an answer had begun and was not whole.
            received: bytes that have arrived so far; None where the system does not tell.
        """
        self._begun, self._received = begun, received
        self._lock = threading.Lock()
        self._bytes, self._counted, self._seconds = received(), begun(), 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            nbytes, begun = self._received(), self._begun()
            if nbytes is None or nbytes != self._bytes:
                self._seconds += begun - self._counted
            self._bytes, self._counted = nbytes, begun
            return self._seconds


@dataclass(eq=False, kw_only=True)
class Measured:
    """A request whose time tells how fast a server is."""

    kind: int
    """Requests of one kind take as long for each sample; the split."""
    samples: Callable[[], int]
    """The samples that are still missing."""
    second: Callable[[Transport, Cancellation], Callable[[], Any]] | None = None
    """Asks a server for what is missing, in a thread of its own, and returns the function that takes its whole answer
    in place of the first server's. None: never asked twice.
    """
    arriving_seconds: Callable[[], float] = float
    """Seconds so far in which any answer was arriving."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Breaks the attempt under way."""
    shared: bool = False
    """True when the answer was kept, or computed for others, in part at least: its time tells nothing of the server."""


@dataclass(eq=False, kw_only=True)
class Server(ServerLoad):
    """A server of a pool."""

    transport: Transport
    name: str
    """Its URL as all sides write it."""
    failures: int = 0
    well_at: float = 0.0
    """Monotonic time before which it is left alone."""
    absent: bool = False
    """True since it could not be reached: it is asked for nothing before it answers again, where there are others."""


class Servers(Protocol):
    """Choice and accounts of servers; thread-safe."""

    def straggles_from(self, request: InFlight) -> float | None:
        """Return the seconds of waiting from which on ``request`` straggles; None: not known yet."""

    def longest_usual(self, asked: Asked) -> float | None:
        """Return the seconds that nearly all requests waited at most; None: not known yet."""

    def rescue(self, request: InFlight) -> tuple[Server, Asked] | None:
        """Return the server that ``request`` is sent to as well, counted already; None for none."""

    def rescued(self, server: Server, asked: Asked, error: HapiError | None, *, answered: bool) -> None:
        """Note that a second request is over.

        Args:
            server: which it was sent to.
            asked: its note.
            error: the server's fault; None for none.
            answered: whether it was answered whole.
        """


@dataclass(eq=False)
class InFlight:
    """A request under way that may be sent to a second server. Thread-safe."""

    server: Server
    measured: Measured
    asked: Asked
    first: Cancellation
    """Cancels the first server's attempt."""
    arriving_before: float
    superseded: bool = False
    """True when the second server's answer was taken."""
    hedged: bool = False
    _second: Cancellation | None = None
    _taken: Callable[[], Any] | None = None
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def outstanding(self, now: float) -> Outstanding:
        """Return how it stands."""
        arriving = self.measured.arriving_seconds() - self.arriving_before
        return Outstanding(self.asked, self.measured.samples(), max(0.0, now - self.asked.at - arriving))

    def begin_second(self) -> Cancellation | None:
        """Note that it is sent to a second server; None when it is over already."""
        with self._lock:
            if self._over:
                return None
            self._second = Cancellation()
            return self._second

    def win(self, take: Callable[[], Any]) -> None:
        """Note that the second server has answered whole, and break the first one's answer."""
        with self._lock:
            if not self._over:
                self._taken = take
                self.first.cancel()

    def end(self) -> Callable[[], Any] | None:
        """Note that the first server's attempt is over; return the function that takes the second's answer, if there
        is one.
        """
        with self._lock:
            self._over = True
            if self._second is not None and self._taken is None:
                self._second.cancel()
            return self._taken


class Hedging:
    """Runs requests, and sends stragglers to a second server. Thread-safe."""

    def __init__(self, servers: Servers, closed: threading.Event) -> None:
        """Watch requests until ``closed``, which :meth:`wake` tells."""
        self._servers, self._closed = servers, closed
        self._changed = threading.Condition()
        self._requests: list[InFlight] = []
        self._thread: threading.Thread | None = None
        self._next_look = 0.0
        """Monotonic time of the next look at the requests."""

    def run(self, attempt: Callable[[], T], request: InFlight) -> T:
        """Return the result of ``attempt``, or that of taking a second server's answer."""
        self._watch(request)
        try:
            result = attempt()
        except HapiError:
            take = request.end()
            if take is None:
                raise
            request.superseded = True
            taken: T = take()
            return taken
        finally:
            request.end()
            with self._changed:
                self._requests.remove(request)
        return result

    def wake(self) -> None:
        """Let the thread that watches see that all is closed."""
        with self._changed:
            self._changed.notify_all()

    def _watch(self, request: InFlight) -> None:
        found = self._servers.straggles_from(request)
        straggles_in = LONGEST_PAUSE if found is None else found
        with self._changed:
            self._requests.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_on, name="hapi-stragglers", daemon=True)
                self._thread.start()
            elif time.monotonic() + straggles_in < self._next_look:
                self._changed.notify_all()

    def _look_on(self) -> None:
        """Send stragglers to a second server, until there are no requests for long."""
        while True:
            with self._changed:
                if not self._requests:
                    self._next_look = float("inf")
                    self._changed.wait_for(lambda: self._requests or self._closed.is_set(), SPARE_SECONDS)
                if not self._requests or self._closed.is_set():
                    self._thread = None
                    return
                requests = [request for request in self._requests if not request.hedged]
            pause = min(map(self._consider, requests), default=LONGEST_PAUSE)
            with self._changed:
                pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause))
                self._next_look = time.monotonic() + pause
                if not self._closed.is_set():
                    self._changed.wait(pause)

    def _consider(self, request: InFlight) -> float:
        """Send a request to a second server if it straggles; return the seconds until the next look at it."""
        usual, begins = self._servers.longest_usual(request.asked), self._servers.straggles_from(request)
        if usual is None or begins is None:
            return LONGEST_PAUSE
        early = begins - request.outstanding(time.monotonic()).waited
        if early > 0:
            return early
        found = self._servers.rescue(request)
        if found is None:
            return usual / 4
        request.hedged = True
        second = threading.Thread(target=self._send, args=(request, *found), name="hapi-second", daemon=True)
        try:
            second.start()
        except RuntimeError:  # the system has no thread left: the first server's answer is waited for
            self._servers.rescued(*found, None, answered=False)
        return LONGEST_PAUSE

    def _send(self, request: InFlight, server: Server, asked: Asked) -> None:
        """Ask a second server; what it does wrong is the first one's matter only if that fails, too."""
        cancellation, error, answered = request.begin_second(), None, False
        try:
            if cancellation is not None and request.measured.second is not None:
                take = request.measured.second(server.transport, cancellation)
                answered = True
                request.win(take)
        except HapiError as problem:
            error = None if cancellation is None or cancellation.cancelled else problem
        except Exception:
            log.debug("a second request at %s ended", server.transport.url, exc_info=True)
        finally:
            self._servers.rescued(server, asked, error, answered=answered)
