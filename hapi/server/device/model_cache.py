"""Resident fronts, kept between requests within a byte budget, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hapi.models.graph.segment import Segment
from hapi.models.keyed_locks import KeyedLocks
from hapi.server.device.weight_pool import WeightPool

MAX_PREFIXES = 64
"""Fronts that are kept, whatever they weigh: one more over shared weights takes no bytes on the device, but modules
and graphs on the host (measured: ResNet18 0.3 MiB, DenseNet121 2 MiB), and requests may name any input shape."""


@dataclass
class FrozenPrefix:
    """Layers 1..split of one model, resident on a device."""

    segment: Segment
    output_shape: tuple[int, ...]
    """Shape of one sample's output."""
    output_dtype: torch.dtype
    weights: tuple[tuple[str, int], ...]
    """Key of content and bytes of each distinct tensor (parameters, buffers, constants), in layer order."""
    channels_last: bool = False
    """True when its inputs are put into that memory format."""
    identity: str = ""
    """Identity from the digest: prefixes with the same one compute the same, to the bit, under any name."""
    make_layers: Callable[[], Sequence[Segment]] = tuple
    """The layers one by one, over the same weights."""
    users: int = 0
    _layers: Sequence[Segment] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, some of which other fronts may hold as well."""
        return sum(nbytes for _, nbytes in self.weights)

    def layers(self) -> Sequence[Segment]:
        """Each layer as a segment, to be timed; made when they are asked for first."""
        if self._layers is None:
            self._layers = self.make_layers()
        return self._layers


class ModelCache:
    """Loads fronts once and hands them out; thread-safe.

    A loader takes a front's weights from :meth:`pool`, where they are held until the front is dropped. ``budget``
    bounds the bytes kept for later; fronts in use are never dropped, so that it can be exceeded while requests run.
    ``reuse=False`` is the paper's default: load for every request, keep nothing, share nothing.
    """

    def __init__(self, budget: int, *, reuse: bool = True) -> None:
        self.reuse = reuse
        self._pool = WeightPool()
        self._budget = budget if reuse else 0
        self._lock = threading.Lock()
        self._loading = KeyedLocks()
        self._prefixes: OrderedDict[str, FrozenPrefix] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @contextmanager
    def prefix(self, key: str, load: Callable[[], FrozenPrefix]) -> Iterator[FrozenPrefix]:
        """The front for ``key``, loaded by ``load`` when it is not resident; not evicted inside the block."""
        if not self.reuse:
            with self._lock:
                self.misses += 1
            yield load()
            return
        prefix = self._acquire(key, load)
        try:
            yield prefix
        finally:
            with self._lock:
                prefix.users -= 1
                self._trim()

    def pool(self) -> WeightPool:
        """Return the pool for the weights of a prefix that is being loaded; without reuse it is its own."""
        return self._pool if self.reuse else WeightPool()

    def _acquire(self, key: str, load: Callable[[], FrozenPrefix]) -> FrozenPrefix:
        with self._loading.holding(key):  # two requests for the same front load it once
            with self._lock:
                prefix = self._prefixes.get(key)
                if prefix is not None:
                    self.hits += 1
                    prefix.users += 1
                    self._prefixes.move_to_end(key)
                    return prefix
            prefix = load()
            with self._lock:
                self.misses += 1
                prefix.users += 1
                self._prefixes[key] = prefix
                return prefix

    def _trim(self) -> None:
        """Drop idle fronts until the rest is within the budget. With the lock held."""
        excess = self._pool.resident_bytes - self._budget
        for key in self._idle():
            if excess <= 0 and len(self._prefixes) <= MAX_PREFIXES:
                return
            excess -= self._drop(key)

    def _idle(self) -> list[str]:
        """Keys of the fronts that are not in use, the least recently used first."""
        return [key for key, prefix in self._prefixes.items() if prefix.users == 0]

    def _drop(self, key: str) -> int:
        return self._pool.release(key for key, _ in self._prefixes.pop(key).weights)

    def evict(self, nbytes: int, also: Collection[str] = ()) -> int:
        """Drop fronts that are not in use, the least recently used first, until ``nbytes`` bytes were freed.

        Those whose :attr:`FrozenPrefix.identity` is in ``also`` stay. Returns the bytes freed, fewer when there are
        no more. A tensor is freed when no other front holds it.
        """
        freed = 0
        with self._lock:
            for key in self._idle():
                if freed >= nbytes:
                    break
                if self._prefixes[key].identity not in also:
                    freed += self._drop(key)
        return freed

    def has(self, identity: str) -> bool:
        """Return whether a front with this :attr:`FrozenPrefix.identity` is resident."""
        with self._lock:
            return any(prefix.identity == identity for prefix in self._prefixes.values())

    def in_use(self, also: Collection[str] = ()) -> tuple[int, frozenset[str]]:
        """Distinct bytes and identities of fronts that requests use, or whose identity is in ``also``."""
        with self._lock:
            used = [f for f in self._prefixes.values() if f.users or f.identity in also]
        return _distinct_bytes(used), frozenset(f.identity for f in used)

    @property
    def prefix_bytes(self) -> int:
        """Distinct bytes of all fronts, without those that are being loaded."""
        with self._lock:
            prefixes = list(self._prefixes.values())
        return _distinct_bytes(prefixes)

    def drop_idle(self) -> int:
        """Drop every front that is not in use, for a device that is out of memory; returns the bytes freed."""
        with self._lock:
            return sum(self._drop(key) for key in self._idle())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights held now, each distinct content once; those of a load under way as they come in."""
        return self._pool.resident_bytes

    @property
    def loading_bytes(self) -> int:
        """Bytes of weights that are being loaded and not resident yet."""
        return self._pool.loading_bytes


def _distinct_bytes(prefixes: Iterable[FrozenPrefix]) -> int:
    return sum({key: nbytes for prefix in prefixes for key, nbytes in prefix.weights}.values())
