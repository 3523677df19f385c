"""Means of loading the batches of a pass, shared by the parts that do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hapi.cache.samples import SampleCache
from hapi.client.caching.sources import PassFeatures
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pacing import RequestPacer
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.transport.holders import Holders
from hapi.client.transport.server_pool import ServerPool
from hapi.trace import Tracer
from hapi.wire.references import DatasetReference


def _never(split: int) -> bool:
    return False


def _always(live: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class PassLoading:
    """Servers, memory, caches and bounds of one pass."""

    servers: ServerPool
    """Servers that requests go to."""
    traffic: Traffic
    """Counts what comes."""
    buffers: BufferPool
    """Memory of the batches."""
    tracer: Tracer
    """Records requests."""
    codecs: WireCodecs
    """Knows which servers encode."""
    request_size: int
    """Most samples of a request."""
    in_flight: int
    """Most requests under way at a time."""
    budget: int
    """Bytes of batches that may be here at once."""
    caches: Mapping[DatasetReference, SampleCache] = field(default_factory=dict)
    """Caches of stored samples."""
    keep_samples: bool = True
    """True when stored samples that come over the network come into these."""
    features: PassFeatures | None = None
    """Features that are kept; None for none."""
    pacing: RequestPacer | None = None
    """Sends no more requests than the link needs; None for as many as allowed."""
    holders: Holders | None = None
    """Finds the servers that keep features; None where none does, or there is one only."""
    check: bool = True
    """True to refuse features that are no numbers."""
    movable: Callable[[int], bool] = _never
    """Function that tells whether samples that servers have no memory for at a split may be tried at an earlier one.
    """
    may_open: Callable[[int], bool] = _always
    """Function that tells whether a batch may open beside so many others that are here or under way."""
