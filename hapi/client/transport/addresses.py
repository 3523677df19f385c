"""Servers that one name stands for: addresses, as of a Kubernetes headless service, or those of a fleet's list.

They are looked up again now and then, and soon after a server could not be reached: one that is gone is asked for
nothing more and finishes its requests, a new one joins. The Host header and the TLS name stay a name's own.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hapi.client.transport.fleet_list import list_address, listed_servers
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import HapiError
from hapi.wire.transport.base import Transport
from hapi.wire.transport.urls import canonical_url, parse_url

log = logging.getLogger("hapi.client")

REFRESH_SECONDS, HURRIED_SECONDS = 30.0, 1.0
"""Seconds between two look-ups of a name (as a Kubernetes record may be kept), and at least after a failure."""
Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host and port, in any order; none for a name that is not known now."""


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``, of IPv4 or IPv6: a machine with one of each kind is one server."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    kinds: dict[int, dict[str, None]] = {}
    for family, _, _, _, address in found:
        kinds.setdefault(family, {})[str(address[0])] = None
    return max((list(addresses) for addresses in kinds.values()), key=len, default=[])


MakeTransport = Callable[[str, str | None], Transport]
"""Makes the transport to a server's URL: to one address of its name, or with None to the name, whatever it means."""


@dataclass(eq=False)
class ServerName(ABC):
    """A user's name for one server or several, and the transports to them."""

    url: str
    make: MakeTransport
    known: dict[str, Transport] = field(default_factory=dict, init=False)
    """By what is looked up."""

    @property
    @abstractmethod
    def may_change(self) -> bool:
        """Whether there is anything to look up."""

    @abstractmethod
    def found(self) -> Sequence[str]:
        """Return what it stands for now. Raises HapiError."""

    @abstractmethod
    def transport(self, key: str) -> Transport:
        """Return a transport to one that was found."""

    def add(self, key: str) -> Transport:
        """Return the transport to a new one."""
        self.known[key] = made = self.transport(key)
        return made

    def __str__(self) -> str:
        return f"{self.url}: {len(self.known)} servers, {', '.join(sorted(self.known))}"


@dataclass(eq=False)
class NamedServer(ServerName):
    """A server's URL: known by address, and under no address the transport to a name that has one only."""

    resolve: Resolve

    @property
    def may_change(self) -> bool:
        """Whether it is a name."""
        return not _is_literal(parse_url(self.url).host)

    def found(self) -> Sequence[str]:
        """Return its addresses now; an empty one for the name itself, as long as it never had several."""
        address = parse_url(self.url)
        several = self.resolve(address.host, address.port) if self.may_change else ()
        if len(several) > 1 or (several and self.known and "" not in self.known):
            return several
        return list(self.known) or [""]

    def transport(self, key: str) -> Transport:
        """Return a transport to an address."""
        return self.make(self.url, key or None)


@dataclass(eq=False)
class ListedServers(ServerName):
    """A fleet's list: known by the servers' URLs."""

    address: str
    """The list's own URL."""
    listed: Callable[[str], Sequence[str]]

    @property
    def may_change(self) -> bool:
        """True."""
        return True

    def found(self) -> Sequence[str]:
        """Return the servers' URLs now; those that are known where the list does not answer, or is empty.

        Raises:
            HapiError: there is no list, and none was read before.
        """
        try:
            return list(dict.fromkeys(self.listed(self.address)))
        except HapiError as error:
            if not self.known:
                raise
            log.debug("%s: %s", self.url, error)
            return list(self.known)

    def transport(self, key: str) -> Transport:
        """Return a transport to a server of the list."""
        return self.make(key, None)


class ServerAddresses:
    """Follows names of servers to their addresses, and lists of fleets to their servers."""

    def __init__(
        self,
        urls: Sequence[str],
        make: MakeTransport,
        resolve: Resolve = resolve,
        listed: Callable[[str], Sequence[str]] = listed_servers,
        *,
        seconds: float = REFRESH_SECONDS,
        hurried: float = HURRIED_SECONDS,
    ) -> None:
        """Look up all names.

        Args:
            urls: of servers, and of lists after ``fleet+``.
            make: makes the transports.
            resolve: looks a name up.
            listed: returns the URLs of a list at its address, or raises :class:`HapiError`.
            seconds: between two look-ups.
            hurried: between two look-ups when servers fail.

        Raises:
            UsageError: not a server's URL.
            HapiError: a list does not answer, or is empty.
        """
        self._named = [
            NamedServer(url, make, resolve)
            if (address := list_address(url)) is None
            else ListedServers(url, make, address, listed)
            for url in _distinct(urls)
        ]
        self._seconds, self._hurried = seconds, hurried
        self._failed = False
        self.transports: list[Transport] = []
        """Transports to all servers at the beginning; one that several names stand for is there once."""
        for named in self._named:
            added = [named.add(address) for address in named.found()]
            self.transports += [one for one in added if not self._is_named_too(named, one)]
            if len(named.known) > 1:
                log.info("%s", named)

    def follow(self, pool: ServerPool) -> None:
        """Keep the servers of ``pool`` as the names have them until it is closed, from a thread of its own."""
        if any(named.may_change for named in self._named):
            threading.Thread(target=self._follow, args=(pool,), name="hapi-addresses", daemon=True).start()

    def failed(self) -> None:
        """Note that a server could not be reached: its address may be gone."""
        self._failed = True

    def _follow(self, pool: ServerPool) -> None:
        due = time.monotonic() + self._seconds
        while not pool.wait_closed(self._hurried):
            if self._failed or time.monotonic() >= due:
                self._failed = False
                for named in self._named:
                    self._refresh(named, pool)
                due = time.monotonic() + self._seconds

    def _refresh(self, named: ServerName, pool: ServerPool) -> None:
        """Let a name's new addresses join, and those that are gone leave; a name without any keeps what it has."""
        found, known = named.found(), named.known
        if set(found) == known.keys():
            return
        for address in [a for a in found if a not in known]:
            try:
                added = named.add(address)
            except HapiError as error:  # as of a URL that is none; the others are as good
                log.warning("%s: %s cannot join: %s", named.url, address, error)
                continue
            if not self._is_named_too(named, added):
                pool.join(added)
        for address in [a for a in known if a not in found]:
            gone = known.pop(address)
            if not self._is_named_too(named, gone) and not pool.leave(gone.url, at_once=False):
                known[address] = gone  # the last one stays
        log.info("%s", named)

    def _is_named_too(self, named: ServerName, transport: Transport) -> bool:
        """Return whether another name stands for the same server."""
        others = (other for other in self._named if other is not named)
        return any(known.url == transport.url for other in others for known in other.known.values())


def _distinct(urls: Sequence[str]) -> list[str]:
    """Return the first of those that are written differently and mean the same; UsageError for no server's URL."""
    found: dict[str, str] = {}
    for url in urls:
        found.setdefault(url if list_address(url) is not None else canonical_url(url), url)
    return list(found.values())


def _is_literal(host: str) -> bool:
    """Return whether there is nothing to look up: an address, or this machine."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
