"""Facts about a run's caches, from which the choice of what is kept is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from hapi.arrays import IntArray
from hapi.cache.samples import SampleCache
from hapi.cache.writing.fast_part import FastPart
from hapi.client.planning.counts import Snapshot
from hapi.profiler.reuse.facts import CutCodecs, KeptShare, ReuseFacts, Storage
from hapi.wire.cache_room import CacheRoom

READ_RATE, WRITE_RATE = 500e6, 200e6
"""Bytes per second of a disk that was not measured: a plain SSD."""
SERVER_BYTES = 100 * 10**9
"""Bytes that a server is taken to keep that does not tell: the most that one takes by itself."""
_REPEATED, _KEPT = 0.1, 0.9
"""A server that was asked again for so much of the data, and had kept less than this part of it, keeps no more."""


class KeptAt(NamedTuple):
    """Cut of kept features, 0 for stored samples, and the split that they came by where it is of meaning."""

    cut: int
    split: int | None = None


class Shares(Protocol):
    """Shares of samples that a cache holds."""

    @property
    def admits(self) -> bool:
        """True while more can be kept, as far as is known."""

    def share(self, ids: IntArray) -> float:
        """Return the share of samples ``ids`` that is cached, from 0 to 1."""


@dataclass(kw_only=True)
class CacheFacts:
    """Tells the choice of what is kept about the caches of both sides."""

    ids: IntArray
    """Training samples of all trainers."""
    trainers: int
    views: int = 1
    """Forms of each sample that are kept."""
    budget: int
    """Most bytes of the cache's folder; 0 for no cache."""
    memory_bytes: int = 0
    samples: Callable[[], SampleCache | None] = lambda: None
    """Cache of stored samples that may be used; None where there is none."""
    features: Callable[[int | None], Mapping[KeptAt, Shares]] = lambda epoch: {}
    """Caches of features that may be used, by cut and split: those of an epoch's view, or None for those of all."""
    rounded: bool = False
    """True where the wire rounds."""
    refused: Callable[[], str] = lambda: ""
    """Reason why features cannot be kept; empty if they can."""
    rates: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
    """Bytes per second that the disk reads and writes, as measured; None for what was not."""
    fast_part: Callable[[], FastPart | None] = lambda: None
    """Bytes that the disk still takes fast, and its rate after them; None where it is not known to become slower."""
    codecs: Callable[[], tuple[CutCodecs, ...]] = tuple
    """Codecs measured on what is kept."""
    wire_codecs: Callable[[], tuple[CutCodecs, ...]] = tuple
    """Codecs measured on what crosses."""
    asked: Callable[[], Snapshot] | None = None
    """Counts of what servers that keep features were asked for; None where they keep none."""
    server_room: Callable[[], CacheRoom | None] = lambda: None
    """Room that these servers told; None from older ones."""

    def __call__(self) -> ReuseFacts:
        """Return the facts as they are now."""
        caches, samples = self._caches(None), self.samples()
        read, write = self.rates()
        storage = Storage(
            # A full disk keeps what it has.
            bytes=self.budget if all(cache.admits for cache in caches.values()) else 0,
            read=read or READ_RATE,
            write=write or WRITE_RATE,
            memory_bytes=self.memory_bytes,
        )
        part = self.fast_part()
        if part is not None and part.slow_write < storage.write:
            storage = replace(storage, slow_write=part.slow_write, fast_bytes=int(part.fast_bytes))
        server, server_kept = self._server_facts()
        return ReuseFacts(
            client=storage if self.budget else None,
            server=server,
            server_kept=server_kept,
            client_kept=self._shares(caches),
            codecs=self.codecs(),
            wire_codecs=self.wire_codecs(),
            samples=max(1, len(self.ids)) * self.views,
            views=self.views,
            trainers=self.trainers,
            refused=self.refused(),
            samples_refused="" if samples is not None else "there is no cache of stored samples",
            rounded=self.rounded,
        )

    def kept_for(self, epoch: int) -> tuple[KeptShare, ...]:
        """Return the shares that ``epoch`` finds in this side's caches: those of its own view."""
        return self._shares(self._caches(epoch))

    def _caches(self, epoch: int | None) -> Mapping[KeptAt, Shares]:
        samples, caches = self.samples(), dict(self.features(epoch))
        return caches if samples is None else {**caches, KeptAt(0): samples}

    def _shares(self, caches: Mapping[KeptAt, Shares]) -> tuple[KeptShare, ...]:
        kept = {at: cache.share(self.ids) for at, cache in caches.items()}
        return tuple(
            KeptShare(cut=at.cut, share=share, split=at.split) for at, share in sorted(kept.items()) if share
        )

    def _server_facts(self) -> tuple[Storage | None, tuple[KeptShare, ...]]:
        """The servers' cache as they and their answers tell: they keep what they were asked for, until they do not."""
        if self.asked is None:
            return None, ()
        shares: list[KeptShare] = []
        announced = self.server_room() or CacheRoom(bytes=SERVER_BYTES)
        samples, room = max(1, len(self.ids)) * self.views, announced.bytes
        for split, counts in sorted(self.asked().items()):
            # Every trainer of the job asks for as much.
            asked, kept = (self.trainers * n for n in (counts.traffic.keepable, counts.traffic.kept))
            if not split or not asked:
                continue
            repeated, share = asked - samples, min(1.0, max(asked / samples, kept / asked))
            if repeated > _REPEATED * samples and kept < _KEPT * repeated:
                room, share = 0, kept / repeated
            shares.append(KeptShare(cut=split, share=share))
        storage = Storage(bytes=room, read=announced.read or READ_RATE, write=announced.write or WRITE_RATE)
        return storage, tuple(shares)
