"""Resident frozen layers, kept between requests within a byte budget, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hapi.models.segment import Segment


@dataclass
class Front:
    """Layers 1..split of one model, resident on a device."""

    segment: Segment
    output_shape: tuple[int, ...]
    """Shape of one sample's output."""
    output_dtype: torch.dtype
    nbytes: int
    """Bytes of parameters and buffers."""
    key: str = ""
    """Of its content, as :attr:`hapi.server.sizing.FrontSizes.weights` has it."""
    make_layers: Callable[[], Sequence[Segment]] = tuple
    """The layers one by one, over the same weights."""
    users: int = 0
    _layers: Sequence[Segment] | None = None

    def layers(self) -> Sequence[Segment]:
        """Each layer as a segment, to be timed; made when they are asked for first."""
        if self._layers is None:
            self._layers = self.make_layers()
        return self._layers


class ModelCache:
    """Loads fronts once and hands them out; thread-safe.

    ``budget`` bounds the bytes kept for later; fronts in use are never dropped, so that it can be exceeded
    while requests run. ``reuse=False`` is the paper's default: load for every request, keep nothing.
    """

    def __init__(self, budget: int, *, reuse: bool = True) -> None:
        self._budget = budget if reuse else 0
        self._reuse = reuse
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._fronts: OrderedDict[str, Front] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @contextmanager
    def front(self, key: str, load: Callable[[], Front]) -> Iterator[Front]:
        """The front for ``key``, loaded by ``load`` when it is not resident; not evicted inside the block."""
        if not self._reuse:
            with self._lock:
                self.misses += 1
            yield load()
            return
        front = self._acquire(key, load)
        try:
            yield front
        finally:
            with self._lock:
                front.users -= 1
                self._evict()

    def _acquire(self, key: str, load: Callable[[], Front]) -> Front:
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:  # two requests for the same front load it once
            with self._lock:
                front = self._fronts.get(key)
                if front is not None:
                    self.hits += 1
                    front.users += 1
                    self._fronts.move_to_end(key)
                    return front
            try:
                front = load()
            except BaseException:
                with self._lock:  # whoever asks for what cannot be loaded must not fill the memory with locks
                    self._loading.pop(key, None)
                raise
            with self._lock:
                self.misses += 1
                front.users += 1
                self._fronts[key] = front
                return front

    def _evict(self) -> None:
        total = sum(f.nbytes for f in self._fronts.values())
        for key, front in list(self._fronts.items()):
            if total <= self._budget:
                return
            if front.users == 0:
                del self._fronts[key]
                self._loading.pop(key, None)
                total -= front.nbytes

    def has(self, key: str) -> bool:
        """Whether the front with this :attr:`Front.key` is resident."""
        with self._lock:
            return any(f.key == key for f in self._fronts.values())

    def in_use(self, also: Collection[str] = ()) -> tuple[int, frozenset[str]]:
        """Bytes and keys (:attr:`Front.key`) of fronts that requests use, or that are in ``also``."""
        with self._lock:
            used = [f for f in self._fronts.values() if f.users or f.key in also]
            return sum(f.nbytes for f in used), frozenset(f.key for f in used)

    def evict(self, nbytes: int, also: Collection[str] = ()) -> int:
        """Drop other fronts, least recently used first, until ``nbytes`` were freed or none is left; the bytes."""
        freed = 0
        with self._lock:
            for key, front in list(self._fronts.items()):
                if freed < nbytes and not front.users and front.key not in also:
                    del self._fronts[key]
                    self._loading.pop(key, None)
                    freed += front.nbytes
        return freed

    def drop_idle(self) -> int:
        """Drop every front that is not in use, for a device that is out of memory; returns their bytes."""
        with self._lock:
            idle = [key for key, front in self._fronts.items() if front.users == 0]
            for key in idle:
                self._loading.pop(key, None)
            return sum(self._fronts.pop(key).nbytes for key in idle)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the fronts held now."""
        with self._lock:
            return sum(f.nbytes for f in self._fronts.values())
