"""Failures of one request: what each says of the server, and whether the request may still succeed."""

from __future__ import annotations

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


def is_absence(error: HapiError) -> bool:
    """Return whether the server, or the store behind it, was not there for the request; otherwise its answer is bad."""
    return isinstance(
        error,
        TransportError | BusyError | DeadlineError | DrainingError | HostMemoryError | StoreUnavailableError,
    )


def is_servers_fault(error: HapiError) -> bool:
    """Return whether the server is left alone for a while after ``error``; otherwise the request is to blame."""
    return error.retryable or isinstance(error, ForeignAnswerError)
