"""Failures of one request: what each says of the server, whether the request may still succeed, and when a person is
told."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from hapi.client.transport.hedging import Server
from hapi.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    ForeignAnswerError,
    HapiError,
    HostMemoryError,
    StoreUnavailableError,
    TransportError,
)

log = logging.getLogger("hapi.client")

OUTAGE_SECONDS = 3.0
"""Seconds without any server after which a person is told."""
BUSY_SECONDS = 60.0
"""Seconds between two lines that tell a person of servers that are too busy."""


@dataclass(eq=False)
class Trouble:
    """One request, and its failures since its last progress."""

    only: str | None
    """URL of the one server that is asked; None: any."""
    content: str
    """Content whose providers are asked first; empty for none."""
    busy_first: bool
    """True when a server that answers sooner is better than a provider."""
    kind: int
    """Kind of request, of :class:`hapi.client.transport.hedging.Measured`."""
    held: bool = False
    """True when the provider may have kept the answer, and is asked unless it is crowded."""
    error: HapiError | None = None
    since: float = 0.0
    """Monotonic time of the first failure."""
    faults: int = 0
    """Damaged answers in a row."""
    tried: set[int] = field(default_factory=set)
    """Ids of the servers that failed."""

    def add(self, server: Server, error: HapiError, now: float) -> None:
        """Note that ``server`` failed at the monotonic time ``now``."""
        if self.error is None:
            self.since = now
        self.error = error
        self.faults = 0 if is_absence(error) else self.faults + 1
        self.tried.add(id(server))

    def may_pass(self, error: HapiError, servers: Iterable[Server]) -> bool:
        """Return whether the request may succeed after ``error``: later, or at one of ``servers`` not yet tried."""
        if isinstance(error, ForeignAnswerError):
            return any(id(server) not in self.tried for server in servers)
        return error.retryable


@dataclass(eq=False)
class OutageLines:
    """Lines that tell a person why nothing moves; otherwise a wrong URL looks like a slow start for minutes.

    An outage is told once. A busy server takes some requests and refuses others, so that no answer ends that: it is
    told once a minute.
    """

    retry_timeout: float
    """Seconds after which a request is given up."""
    _reported: bool = False
    _busy_reported: float = -BUSY_SECONDS
    """Monotonic time at which a person was told of busy servers."""

    def answered(self) -> None:
        """Note that a request was answered."""
        self._reported = False

    def is_due(self, trouble: Trouble, now: float) -> bool:
        """Return whether a person is to be told of ``trouble`` now, by :meth:`tell`."""
        busy = isinstance(trouble.error, BusyError | DeadlineError)
        reported = now - self._busy_reported < BUSY_SECONDS if busy else self._reported
        if reported or now - trouble.since < OUTAGE_SECONDS:
            return False
        if busy:
            self._busy_reported = now
        else:
            self._reported = True
        return True

    def tell(self, trouble: Trouble, pause: float) -> None:
        """Tell a person of ``trouble``, and that the next try comes after ``pause`` seconds."""
        if isinstance(trouble.error, BusyError | DeadlineError):
            log.warning(
                "the server is too busy and sends requests away (%s); next try in %.0f s, giving up after %.0f s",
                trouble.error,
                pause,
                self.retry_timeout,
            )
        else:
            log.warning(
                "no request gets through (%s); trying for up to %.0f s", trouble.error, self.retry_timeout
            )


def is_absence(error: HapiError) -> bool:
    """Return whether the server, or the store behind it, was not there for the request; otherwise its answer is bad."""
    return isinstance(
        error,
        TransportError | BusyError | DeadlineError | DrainingError | HostMemoryError | StoreUnavailableError,
    )


def is_servers_fault(error: HapiError) -> bool:
    """Return whether the server is left alone for a while after ``error``; otherwise the request is to blame."""
    return error.retryable or isinstance(error, ForeignAnswerError)
