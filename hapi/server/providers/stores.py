"""Reads of packs through the servers of a list: this one's memory, their providers, and then the store.

Each pack has its providers, by rendezvous hashing over the list (DStore, section 3: a stable hash of the id names the
provider). A server asks them in the order of the ranking up to its own place, and goes to the store when none gives it.
A provider that is asked by another server answers from its memory or the store and asks no third
(:data:`hapi.wire.messages.PEER_HEADER`), so that requests do not run in circles.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hapi.errors import UsageError
from hapi.process.threads import Threads
from hapi.repository.packs.place import pack_of, pack_path
from hapi.server.providers.blocks import BlockCache
from hapi.server.providers.delegating import DelegatingStore
from hapi.server.providers.peers import Peers
from hapi.server.settings import ServiceSettings
from hapi.store.base import ObjectStore, Range, ReadPart, Then, nothing
from hapi.store.http.ranges import HttpRanges
from hapi.wire.messages import PEER_HEADER
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits
from hapi.wire.transport.urls import canonical_url

SILENCE_SECONDS = 5.0
"""Longest silence of another server, and longest time until a connection stands."""
LEAST_RATE, RATE_SECONDS = 1 << 20, 5.0
"""Bytes a second that it must bring, and over how many seconds: the store is the way out."""
DISTRUSTED_KEPT = 1024
"""Packs remembered that are read from the store alone."""
MEMORY, PEER, STORE = "memory", "peer", "store"
SOURCES = (MEMORY, PEER, STORE)
"""Where bytes of packs came from."""


class OwnPacks(DelegatingStore):
    """The store, with the packs that this server provides kept in memory: what it gives to other servers."""

    def __init__(self, origin: ObjectStore, peers: Peers, memory: int) -> None:
        """Keep ``memory`` bytes; 0, and a store of files, whose pages the kernel keeps: none."""
        super().__init__(origin)
        self._peers = peers
        self.blocks = BlockCache(origin, memory) if memory else None
        self._lock = threading.Lock()
        self._passed = 0

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part, those of provided packs through memory."""
        kept, others = list[int](), list[int]()
        for number, part in enumerate(parts):
            (kept if self._keeps(part.key) else others).append(number)
        if others:
            self.origin.read_many([parts[n] for n in others], lambda i: then(others[i]))
            packs = sum(parts[n].out.nbytes for n in others if pack_of(parts[n].key))
            with self._lock:
                self._passed += packs
        for number in kept:
            if self.blocks is not None:
                self.blocks.read(parts[number])
            then(number)

    def _keeps(self, key: str) -> bool:
        pack = pack_of(key)
        return self.blocks is not None and pack is not None and self._peers.provides(pack)

    def announce(self, ranges: Sequence[Range]) -> None:
        """Announce what is read from the store as it is."""
        self.origin.announce([wanted for wanted in ranges if not self._keeps(wanted[0])])

    def distrust(self, key: str, start: int, stop: int) -> bool:
        """Drop the pack from memory, where it may have been damaged."""
        if not self._keeps(key) or self.blocks is None:
            return False
        self.blocks.forget(key)
        return True

    def counts(self) -> Mapping[str, int]:
        """Bytes of packs given from memory and read from the store so far."""
        hits, read = (0, 0) if self.blocks is None else (self.blocks.hit_bytes, self.blocks.read_bytes)
        with self._lock:
            return {MEMORY: hits, STORE: self._passed + read}


class ProvidedPacks(DelegatingStore):
    """A store whose packs come from their providers, where these have them."""

    def __init__(self, own: OwnPacks, peers: Peers) -> None:
        super().__init__(own)
        self._own = own
        self._peers = peers
        self._lock = threading.Lock()
        self._from: OrderedDict[str, str | None] = OrderedDict()
        """URL of the server that gave a pack last, by key; None: it is read from the store, whoever has it."""
        self._counts: Counter[str] = Counter()

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part: packs from the first of their providers that gives them, all else from the store."""
        by_key: dict[str, list[int]] = {}
        others: list[int] = []
        for number, part in enumerate(parts):
            if pack_of(part.key) is None or self._is_distrusted(part.key):
                others.append(number)
            else:
                by_key.setdefault(part.key, []).append(number)
        for key, numbers in by_key.items():
            if not self._from_peers(key, parts, numbers, then):
                others += numbers
        if others:
            others.sort()
            self._own.read_many([parts[n] for n in others], lambda i: then(others[i]))

    def _from_peers(self, key: str, parts: Sequence[ReadPart], numbers: Sequence[int], then: Then) -> bool:
        """Fill the parts ``numbers``, all of the pack at ``key``; return whether a provider gave them."""
        wanted = [parts[n] for n in numbers]
        for peer in self._peers.to_ask(pack_of(key) or ""):
            if self._peers.read(peer, wanted, nothing):
                with self._lock:
                    self._counts[PEER] += sum(part.out.nbytes for part in wanted)
                    self._remember(key, peer.url)
                for number in numbers:
                    then(number)
                return True
        return False

    def _remember(self, key: str, url: str | None) -> None:
        self._from[key] = url
        self._from.move_to_end(key)
        if len(self._from) > DISTRUSTED_KEPT:
            self._from.popitem(last=False)

    def _is_distrusted(self, key: str) -> bool:
        with self._lock:
            return key in self._from and self._from[key] is None

    def _asks(self, key: str) -> bool:
        """Return whether another server would be asked for what is at ``key``."""
        pack = pack_of(key)
        return pack is not None and not self._is_distrusted(key) and bool(self._peers.to_ask(pack))

    def announce(self, ranges: Sequence[Range]) -> None:
        """Announce to the store what is not asked from other servers."""
        self._own.announce([wanted for wanted in ranges if not self._asks(wanted[0])])

    def local_path(self, key: str) -> Path | None:
        """None: what is read from here may come over the network."""
        del key
        return None

    def open_file(self, key: str) -> int | None:
        """None for what other servers are asked for."""
        return None if self._asks(key) else self._own.open_file(key)

    def distrust(self, key: str, start: int, stop: int) -> bool:
        """Read the pack from the store from now on, and leave the server alone that sent it."""
        with self._lock:
            url = self._from.get(key)
            if url is not None:
                self._remember(key, None)
        if url is None:
            return self._own.distrust(key, start, stop)
        self._peers.leave(url)
        return True

    def counts(self) -> Mapping[str, int]:
        """Bytes of packs so far by :data:`SOURCES`."""
        with self._lock:
            return {PEER: self._counts[PEER], **self._own.counts()}


@dataclass(frozen=True)
class Providers:
    """The stores of packs of one server, and its way to the others."""

    packs: ObjectStore
    """For this server's own work and its clients."""
    own: ObjectStore
    """For other servers."""
    peers: Peers | None = None

    def counts(self) -> Mapping[str, int]:
        """Bytes of packs so far by :data:`SOURCES`; 0 without other servers."""
        found = self.packs.counts() if isinstance(self.packs, ProvidedPacks) else {}
        return {source: found.get(source, 0) for source in SOURCES}

    @property
    def failures(self) -> int:
        """Reads that failed at another server."""
        return 0 if self.peers is None else self.peers.failures

    def use_token(self, token: str | None) -> None:
        """Ask other servers with ``token`` from now on."""
        if self.peers is not None:
            self.peers.use_token(token)

    def pools(self) -> Sequence[Threads]:
        """Thread pools that read from other servers."""
        return [] if self.peers is None else self.peers.pools()

    def close(self) -> None:
        """End the connections to other servers."""
        if self.peers is not None:
            self.peers.close()


def memory_bytes(settings: ServiceSettings, store: ObjectStore) -> int:
    """Return the bytes in which a server keeps packs that it provides."""
    provides = settings.advertise is not None and store.local_path("packs") is None
    return settings.provider_memory if provides else 0


def make_providers(settings: ServiceSettings, store: ObjectStore, token: str | None) -> Providers:
    """Return the stores for the packs of ``store``, through the servers of the settings.

    Args:
        settings: with the list of servers; empty: none is asked.
        store: of the server.
        token: for the other servers; None for none.

    Raises:
        UsageError: a URL is none, or the server's own is not in the list.
    """
    if not settings.providers:
        if settings.advertise is not None:
            raise UsageError("--advertise: give the servers with --providers too, this one's URL among them")
        return Providers(store, store)
    urls = list(dict.fromkeys(map(canonical_url, settings.providers)))
    own_url = None if settings.advertise is None else canonical_url(settings.advertise)
    if own_url is not None and own_url not in urls:
        raise UsageError(
            f"--advertise {settings.advertise}: is not one of --providers; add it to all servers"
        )
    limits = AnswerLimits(silence=SILENCE_SECONDS, rate=LEAST_RATE, window=RATE_SECONDS)
    readers = []
    for url in urls:
        if url != own_url:
            ca_file = settings.provider_ca if url.startswith("https:") else None
            transport = HttpTransport(
                url, token=token, ca_file=ca_file, timeout=SILENCE_SECONDS, answer_limits=limits
            )
            readers.append((url, HttpRanges(transport, pack_path, headers={PEER_HEADER: "1"})))
    peers = Peers(readers, own_url, settings.provider_replicas)
    own = OwnPacks(store, peers, memory_bytes(settings, store))
    return Providers(ProvidedPacks(own, peers), own, peers)
