"""Several servers as one: ask a healthy one, the first to answer or a content's provider; back off from failing ones.

Requests are idempotent and stateless, so that a retry on any server is safe (HAPI, section 4.2).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from hapi.client.transport.absent_servers import AbsentServers
from hapi.client.transport.hedging import Hedging, InFlight, Measured, Server
from hapi.client.transport.server_choice import CROWDED, Asked, soonest
from hapi.client.transport.stragglers import Stragglers
from hapi.client.transport.trouble import OutageLines, Trouble, is_absence, is_servers_fault
from hapi.errors import ForeignAnswerError, HapiError, ShortageError, TransportError, UsageError
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.answers import understood
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation
from hapi.wire.transport.urls import canonical_url

T = TypeVar("T")
log = logging.getLogger("hapi.client")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds a server is left alone after its first failure, doubled with each further one up to the longest."""
FAULT_PAUSE = 0.5
"""Longest such pause, in seconds, after a damaged answer: the server is there, and may be well for others."""
MAX_FAULTS = 5
"""Times in a row that one request may meet damaged answers (not absent servers) before it is given up."""
MAX_RETRY_FACTOR = 10
"""Times the patience after which a request is given up even though the servers answer others."""
LONGEST_WAIT = 0.2
"""Seconds between two looks whether a waiting request is still wanted."""
_UNMEASURED = -1
"""Kind of the requests whose times are not kept."""


class Stopped(Exception):
    """The pool was closed, or its caller no longer wants the result, while a request was under way."""


class ServerPool:
    """Runs attempts against the servers; thread-safe.

    ``retry_timeout`` is how many seconds a request is tried while no server answers, it or another: on servers that
    are shared by many, one may be sent away for long although all of them move.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        retry_timeout: float = 300.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``check`` is called when a server could not be reached, and raises if it knows that none ever will be."""
        if not transports:
            raise ValueError("a pool needs at least one server")
        self._servers = [Server(transport=t, name=_name_of(t.url)) for t in transports]
        self._left: tuple[list[Server], int] = [], 0
        """Servers that are not asked any more and have not finished, and the bytes that others had received."""
        self._chosen = 0  # requests to any server so far
        self._retry_timeout = retry_timeout
        self._check = check
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._jitter = random.Random()
        self._outage = OutageLines(retry_timeout)
        self._answered = -math.inf
        """Monotonic time of the last good answer to any request."""
        self._absent = AbsentServers(self._closed, lambda server: server in self._servers)
        self._stragglers = Stragglers()
        self._hedging = Hedging(self, self._closed)
        self.retries = 0
        """Attempts that failed and were made again."""

    @property
    def size(self) -> int:
        """Number of servers."""
        return len(self._servers)

    @property
    def extra_requests(self) -> int:
        """Requests that were sent to a second server, too."""
        return self._stragglers.extra

    @property
    def urls(self) -> list[str]:
        """URLs of the servers that are asked, in the order given."""
        with self._lock:
            return [server.transport.url for server in self._servers]

    @property
    def names(self) -> list[str]:
        """The same as all sides write them."""
        with self._lock:
            return [server.name for server in self._servers]

    def find_absent(self, seconds: float) -> None:
        """Ask all servers whether they are there, for so long at most: requests begin with those that are."""
        if self.size > 1:
            self._absent.find(self._servers, seconds)

    def join(self, transport: Transport) -> None:
        """Ask one more server, as soon as it has answered that it is there: until then requests go to the others."""
        server = Server(transport=transport, name=_name_of(transport.url), absent=True)
        with self._lock:
            self._servers = [*self._servers, server]
        self._absent.add(server, at_once=True)

    def leave(self, url: str, *, at_once: bool = True) -> bool:
        """Stop asking the server at ``url``; return False, without effect, if it is the last.

        ``at_once``: break its requests; otherwise it finishes them.
        """
        with self._lock:
            remaining = [s for s in self._servers if s.transport.url != url]
            if not remaining:
                return False
            gone = [s for s in self._servers if s not in remaining]
            (left, nbytes), self._servers = self._left, remaining
            self._left = left + gone, nbytes
        for server in gone if at_once else ():
            server.transport.close()
        self._close_finished()
        return True

    def _close_finished(self) -> None:
        """Close the connections of servers that left and have finished their requests: a fleet may change for ever."""
        with self._lock:
            finished = [server for server in self._left[0] if not server.in_flight]
        for server in finished:
            server.transport.close()
        if finished:
            with self._lock:
                left, nbytes = self._left
                over = [server for server in finished if server in left]  # another thread may have been here
                nbytes += sum(server.transport.received_bytes() or 0 for server in over)
                self._left = [server for server in left if server not in over], nbytes

    def wait_closed(self, seconds: float) -> bool:
        """Wait until the pool is closed, or so long; return whether it is."""
        return self._closed.wait(seconds)

    def get(self, path: str, read: Callable[[Any], T], *, provider_of: str = "") -> T:
        """Return ``read`` of the JSON answer of any server, the providers of a content first, with retries."""
        return self.run(
            lambda transport: understood(transport.call("GET", path), read, transport.url + path),
            provider_of=provider_of,
        )

    def run(
        self,
        attempt: Callable[[Transport], T],
        *,
        progress: Callable[[], object] = lambda: None,
        cancelled: Callable[[], bool] = lambda: False,
        only: str | None = None,
        once: bool = False,
        provider_of: str = "",
        resident: str = "",
        held: str = "",
        measured: Measured | None = None,
    ) -> T:
        """Return the result of ``attempt`` on some server; retryable errors are retried, others raised.

        Args:
            attempt: may be called several times, and must be able to go on where it was.
            progress: when it returns something new after a failure, the time limit begins anew.
            cancelled: asked while waiting for a server, and when an attempt has failed: it was broken off then.
            only: URL of the one server to ask; None for any.
            once: raise a retryable error like any other.
            provider_of: content whose servers are asked in the order of :func:`hapi.wire.rendezvous.ranking`, so that
                each server answers for few contents; empty: the server that is expected to answer first.
            resident: content that is better asked from its provider where several servers would answer as soon.
            held: content that its provider may have kept, and is asked for there unless that is crowded.
            measured: kind and samples of a request whose time is kept for the choice of servers; None: of another one.

        Raises:
            Stopped: the pool was closed, or ``cancelled`` returned True.
        """
        kind = _UNMEASURED if measured is None else measured.kind
        trouble = Trouble(only, provider_of or held or resident, not provider_of, kind, bool(held))
        if once and only is not None and all(server.absent for server in self._allowed(trouble)):
            raise TransportError(f"{only}: it could not be reached, and does not answer yet")
        while True:
            server = self._pick(trouble, cancelled)
            before, flight = progress(), self._sent(server, measured)
            try:
                if flight is None or flight.measured.second is None or only is not None or self.size == 1:
                    result = attempt(server.transport)
                else:
                    result = self._hedging.run(partial(attempt, server.transport), flight)
            except HapiError as error:
                unwanted = self._closed.is_set() or cancelled()  # then this side may have broken it off
                self._settle(server, None if unwanted else error, flight)
                if unwanted:
                    raise Stopped from None
                if progress() != before:
                    trouble = Trouble(only, trouble.content, trouble.busy_first, kind, trouble.held)
                trouble.add(server, error, time.monotonic())
                if self.size > 1:
                    error.about_server(server.transport.url)
                if isinstance(error, TransportError):
                    self._check()
                if once or not trouble.may_pass(error, self._allowed(trouble)) or self._is_over(trouble):
                    raise
                if isinstance(error, ForeignAnswerError) and server.failures == 1:
                    log.warning("%s; another server is asked", error)
                with self._lock:
                    self.retries += 1
            except BaseException:
                self._settle(server, None, flight)
                raise
            else:
                self._settle(server, None, flight, good=True)
                return result

    def _is_over(self, trouble: Trouble) -> bool:
        """Return whether a request has had its tries: every server had one when patience ends."""
        late = time.monotonic() >= self._give_up_at(trouble)
        had_tries = all(id(server) in trouble.tried for server in self._candidates(trouble))
        return trouble.faults >= MAX_FAULTS or (late and had_tries)

    def _allowed(self, trouble: Trouble) -> list[Server]:
        """The servers that a request may go to."""
        return [s for s in self._servers if trouble.only in (None, s.transport.url)]

    def _candidates(self, trouble: Trouble) -> list[Server]:
        """Those of them that are there; where none is, all."""
        allowed = self._allowed(trouble)
        return [server for server in allowed if not server.absent] or allowed

    def _give_up_at(self, trouble: Trouble) -> float:
        """Monotonic time at which patience ends."""
        deadline = trouble.since + MAX_RETRY_FACTOR * self._retry_timeout
        return min(deadline, max(trouble.since, self._answered) + self._retry_timeout)

    def _pick(self, trouble: Trouble, cancelled: Callable[[], bool]) -> Server:
        """The best server that is well, waiting for one if need be.

        Raises the last error when none will be well before patience ends.
        """
        while True:
            with self._lock:
                now, candidates = time.monotonic(), self._candidates(trouble)
                if not candidates:
                    raise TransportError(f"{trouble.only}: it is not asked any more")
                well = [s for s in candidates if s.well_at <= now]
                if well:
                    return self._begun(self._best(well, trouble, now))
                pause = min(s.well_at for s in candidates) - now
            if trouble.error is not None:
                if now + pause > self._give_up_at(trouble):
                    raise trouble.error
                with self._lock:
                    is_due = self._outage.is_due(trouble, time.monotonic())
                if is_due:
                    self._outage.tell(trouble, pause)
            if self._closed.wait(min(pause, LONGEST_WAIT)) or cancelled():
                raise Stopped

    def _begun(self, server: Server) -> Server:
        """Count a request that ``server`` was chosen for, and return it."""
        self._chosen += 1
        server.begin(self._chosen)
        return server

    def _best(self, well: Sequence[Server], trouble: Trouble, now: float) -> Server:
        """Return the one to ask: one that did not fail yet, by its answer's time and its place, or by its place."""
        fresh = [server for server in well if id(server) not in trouble.tried] or well
        places: dict[str, int] = {}
        if trouble.content:
            ranked = ranking((s.name for s in self._servers), trouble.content)
            places = {name: place for place, name in enumerate(ranked)}
        if trouble.held:
            uncrowded = soonest(fresh, trouble.kind, now, self._chosen, CROWDED)
            return min(uncrowded, key=lambda s: places.get(s.name, 0))
        if trouble.busy_first:
            best = soonest(fresh, trouble.kind, now, self._chosen)
            return min(best, key=lambda s: (s.until_free, places.get(s.name, 0)))
        return min(fresh, key=lambda s: (places.get(s.name, 0), s.in_flight))

    def _sent(self, server: Server, measured: Measured | None) -> InFlight | None:
        """Note that a request is sent whose time is kept."""
        if measured is None:
            return None
        measured.cancellation = Cancellation()
        arriving, samples = measured.arriving_seconds(), measured.samples()
        with self._lock:
            self._stragglers.sent += measured.second is not None
            asked = server.asked(measured.kind, samples, time.monotonic())
        return InFlight(server, measured, asked, measured.cancellation, arriving)

    def straggles_from(self, request: InFlight) -> float | None:
        """See :meth:`Servers.straggles_from`."""
        with self._lock:
            return self._stragglers.straggles_from(request.asked, request.server)

    def longest_usual(self, asked: Asked) -> float | None:
        """See :meth:`Servers.longest_usual`."""
        with self._lock:
            return self._stragglers.longest_usual(asked)

    def rescue(self, request: InFlight) -> tuple[Server, Asked] | None:
        """Return the server that ``request`` is sent to as well, counted already; None for none."""
        with self._lock:
            now = time.monotonic()
            others = [
                s for s in self._servers if s is not request.server and s.well_at <= now and not s.absent
            ]
            outstanding = request.outstanding(now)
            found = self._stragglers.rescuer(outstanding, request.server, others, now)
            if found is None:
                return None
            self._stragglers.extra += 1
            return self._begun(found), found.asked(request.asked.kind, outstanding.missing, now)

    def rescued(self, server: Server, asked: Asked, error: HapiError | None, *, answered: bool) -> None:
        """Note that a second request is over; see :meth:`Servers.rescued`."""
        with self._lock:
            now = time.monotonic()
            server.end(now, asked)
            if answered:
                server.answered(asked, now)
                self._answered = now
            if error is not None and is_servers_fault(error):
                self._failed(server, error, now)
        self._close_finished()

    def _settle(
        self, server: Server, error: HapiError | None, flight: InFlight | None, *, good: bool = False
    ) -> None:
        """Note that a request to ``server`` is over; ``good``: answered, there or by a second one."""
        with self._lock:
            now = time.monotonic()
            server.end(now, None if flight is None else flight.asked)
            if good and flight is not None:
                self._stragglers.answered(flight.asked, flight.outstanding(now).waited)
                if flight.superseded:
                    server.outrun(flight.asked, now)
                elif not flight.measured.shared:
                    server.answered(flight.asked, now)
            if good and (flight is None or not flight.superseded):
                server.failures, server.well_at, server.absent = 0, 0.0, False
                self._outage.answered()
                self._answered = now
            if error is not None and is_servers_fault(error):
                self._failed(server, error, now)
        self._close_finished()

    def _failed(self, server: Server, error: HapiError, now: float) -> None:
        """Leave ``server`` alone for a while; one that could not be reached, until it answers."""
        server.failures += 1
        longest = LONGEST_PAUSE if is_absence(error) else FAULT_PAUSE
        pause = min(longest, FIRST_PAUSE * 2 ** min(16, server.failures - 1))
        if error.retry_after is not None:
            pause = min(60.0, max(pause, error.retry_after))
        server.well_at = now + pause * self._jitter.uniform(0.75, 1.25)
        is_absent = isinstance(error, TransportError) and not isinstance(error, ShortageError)
        if is_absent and len(self._servers) > 1:
            self._absent.add(server)

    def received_bytes(self) -> int | None:
        """Bytes that have arrived on all connections so far, read or not; None where the system does not tell."""
        left, before = self._left
        counts = [server.transport.received_bytes() for server in (*self._servers, *left)]
        known = [count for count in counts if count is not None]
        return before + sum(known) if len(known) == len(counts) else None

    def interrupt(self) -> None:
        """Break every request under way; those that are still wanted are repeated."""
        for server in (*self._servers, *self._left[0]):
            server.transport.interrupt()

    def close(self) -> None:
        """Break every request under way; they raise :class:`Stopped`."""
        self._closed.set()
        self._hedging.wake()
        for server in (*self._servers, *self._left[0]):
            server.transport.close()


def _name_of(url: str) -> str:
    """Return ``url`` as servers write it too; as it is where it is of no server on a network."""
    try:
        return canonical_url(url)
    except UsageError:
        return url
