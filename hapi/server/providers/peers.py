"""The other servers of the list: who is asked for a pack, and who is left alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hapi.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    HapiError,
    NotFoundError,
    UnauthorizedError,
)
from hapi.process.threads import Threads
from hapi.store.base import ReadPart, Then
from hapi.store.http.ranges import HttpRanges
from hapi.wire.rendezvous import ranking

log = logging.getLogger("hapi.server")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which a server is not asked after its first failure, doubled with each further one up to the longest."""
BUSY_PAUSE = 1.0
"""Seconds for which one is not asked that has too much to do."""


@dataclass(eq=False)
class Peer:
    """One of the other servers."""

    url: str
    reader: HttpRanges
    failures: int = 0
    well_at: float = 0.0
    """Monotonic time before which it is not asked."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Peers:
    """The servers of a list, of which this is one or none. Thread-safe."""

    def __init__(
        self,
        readers: Sequence[tuple[str, HttpRanges]],
        own_url: str | None,
        replicas: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know the servers.

        Args:
            readers: URL of each other server, and the way to it.
            own_url: URL of this server in the list; None: it provides nothing.
            replicas: servers that provide a pack.
            clock: monotonic seconds.
        """
        self._peers = {url: Peer(url, reader) for url, reader in readers}
        self._own_url = own_url
        self._urls = [*self._peers, *([own_url] if own_url else [])]
        self._replicas = replicas
        self._clock = clock
        self.failures = 0
        """Reads that failed at another server, so that the next was asked."""

    def provides(self, content: str) -> bool:
        """Return whether this server is one of those that provide ``content``."""
        return self._own_url in self._providers(content)

    def _providers(self, content: str) -> list[str]:
        return ranking(self._urls, content)[: self._replicas]

    def to_ask(self, content: str) -> list[Peer]:
        """Return the servers to ask for ``content``, first come first: its providers, up to this one, that are well."""
        found, now = list[Peer](), self._clock()
        for url in self._providers(content):
            if url == self._own_url:
                break
            if self._peers[url].well_at <= now:
                found.append(self._peers[url])
        return found

    def read(self, peer: Peer, parts: Sequence[ReadPart], then: Then) -> bool:
        """Fill ``parts`` from ``peer``; return whether it did. Never an error of the peer's."""
        try:
            peer.reader.read_many(parts, then)
        except HapiError as error:
            self._failed(peer, error)
            return False
        with peer.lock:
            if peer.well_at <= self._clock():  # it did not fail another read meanwhile
                peer.failures = 0
        return True

    def leave(self, url: str) -> None:
        """Ask the server at ``url`` no more for a while: what it sent was wrong."""
        peer = self._peers.get(url)
        if peer is not None:
            self._pause(peer, LONGEST_PAUSE, "sent bytes that are not what they should be")

    def _failed(self, peer: Peer, error: HapiError) -> None:
        if isinstance(error, NotFoundError):  # its store has not got it, or not yet
            self.failures += 1
        elif isinstance(error, BusyError | DeadlineError | DrainingError):
            self._pause(peer, max(BUSY_PAUSE, min(LONGEST_PAUSE, error.retry_after or 0.0)), str(error))
        elif isinstance(error, UnauthorizedError | ForbiddenError):
            advice = "the servers of --providers need the same token (HAPI_TOKEN, --token-file)"
            self._pause(peer, LONGEST_PAUSE, f"{error}; {advice}")
        else:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(16, peer.failures))
            self._pause(peer, pause, str(error))

    def _pause(self, peer: Peer, seconds: float, why: str) -> None:
        with peer.lock:
            self.failures += 1
            peer.failures += 1
            peer.well_at = self._clock() + seconds
            first = peer.failures == 1
        log.log(
            logging.WARNING if first else logging.INFO,
            "a provider is not asked for a while",
            extra={"provider": peer.url, "error": why, "seconds": round(seconds, 1)},
        )

    def use_token(self, token: str | None) -> None:
        """Ask them with ``token`` from now on, also those that refused the last one."""
        for peer in self._peers.values():
            peer.reader.transport.use_token(token)
            peer.well_at = 0.0

    def pools(self) -> list[Threads]:
        """Thread pools of the readers."""
        return [pool for peer in self._peers.values() for pool in peer.reader.pools()]

    def close(self) -> None:
        """End all connections and threads."""
        for peer in self._peers.values():
            peer.reader.transport.close()
            peer.reader.close()
