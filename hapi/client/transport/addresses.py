"""Addresses of a server's name: one that has several, as of a Kubernetes headless service, is several servers.

They are looked up again now and then, and soon after a server could not be reached: one that is gone is asked for
nothing more and finishes its requests, a new one joins. The Host header and the TLS name stay the name.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hapi.client.transport.server_pool import ServerPool
from hapi.wire.transport.http import Transport
from hapi.wire.transport.urls import parse_url

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


@dataclass(eq=False)
class NamedServer:
    """A server's URL, and the transports to its addresses."""

    url: str
    transport: Callable[[str | None], Transport]
    """Makes the transport to one address of the name; None: to the name, whatever it means then."""
    known: dict[str, Transport] = field(default_factory=dict)
    """By address; under no address the transport to a name that has one only."""

    def found(self, resolve: Resolve) -> Sequence[str]:
        """Return its addresses now; an empty one for the name itself, as long as it never had several."""
        address = parse_url(self.url)
        several = () if _is_literal(address.host) else resolve(address.host, address.port)
        return several if len(several) > 1 or (several and self.known and "" not in self.known) else ("",)

    def add(self, address: str) -> Transport:
        """Return the transport to a new address."""
        self.known[address] = made = self.transport(address or None)
        return made

    def __str__(self) -> str:
        return f"{self.url}: {len(self.known)} servers, {', '.join(sorted(self.known))}"


class ServerAddresses:
    """Follows names of servers to their addresses."""

    def __init__(
        self,
        urls: Mapping[str, Callable[[str | None], Transport]],
        resolve: Resolve = resolve,
        *,
        seconds: float = REFRESH_SECONDS,
        hurried: float = HURRIED_SECONDS,
    ) -> None:
        """Look up all names.

        Args:
            urls: for each server's URL the function that makes a transport to one of its addresses, or to its name.
            resolve: looks a name up.
            seconds: between two look-ups.
            hurried: between two look-ups when servers fail.
        """
        self._named = [NamedServer(url, make) for url, make in urls.items()]
        self._resolve, self._seconds, self._hurried = resolve, seconds, hurried
        self._failed = False
        self.transports: list[Transport] = []
        """Transports to all servers at the beginning."""
        for named in self._named:
            self.transports += [named.add(address) for address in named.found(resolve)]
            if len(named.known) > 1:
                log.info("%s", named)

    def follow(self, pool: ServerPool) -> None:
        """Keep the servers of ``pool`` as the names have them until it is closed, from a thread of its own."""
        if not all(_is_literal(parse_url(named.url).host) for named in self._named):
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

    def _refresh(self, named: NamedServer, pool: ServerPool) -> None:
        """Let a name's new addresses join, and those that are gone leave; a name without any keeps what it has."""
        found, known = named.found(self._resolve), named.known
        if set(found) == known.keys() or ("" in found and "" not in known):
            return
        for address in [a for a in found if a not in known]:
            pool.join(named.add(address))
        for address in [a for a in known if a not in found]:
            pool.leave(known.pop(address).url, at_once=False)
        log.info("%s", named)


def _is_literal(host: str) -> bool:
    """Return whether there is nothing to look up: an address, or this machine."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
