"""One device's memory, divided among requests: each is admitted with the COS batch that fits, never beyond.

Sizes are predicted (:mod:`hapi.server.device.sizing`) and corrected by peaks that the device saw;
:func:`hapi.server.batching.policies.adapt` decides. A request's promised memory is held for it until it is
over, so that forward passes of admitted requests cannot collide. Unused resident weights count as free: they
are dropped when the room is needed.

    claim -> waiting -> admitted (batch) -> loaded -> released
      |          |
      +-- impossible (507), client gone, too late (429)
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hapi.errors import BadRequestError, BusyError
from hapi.server.batching.forward_memory import ForwardMemory, Key, MemoryReport, ObservedMemory
from hapi.server.batching.policies import (
    GATHER_SECONDS,
    Adaptation,
    DeviceState,
    Request,
    Weights,
    adapt,
    check_fits,
)
from hapi.server.batching.throughput_curve import TimeCurves
from hapi.waiting import Interest, paused, when_given_up

LOOK_SECONDS = 0.25
"""Seconds between two checks whether a waiting request's client is still there."""
LATE_SECONDS = 5.0
"""Seconds after which a request that waited for too long is to retry: the memory has been held for long."""


class Resident(Protocol):
    """The weights on the device: a :class:`~hapi.server.device.model_cache.ModelCache`."""

    @property
    def prefix_bytes(self) -> int:
        """Bytes of all of them, without those that are being loaded."""

    def in_use(self, also: Collection[str]) -> tuple[int, frozenset[str]]:
        """Return bytes and keys of those that requests use, or that are in ``also``."""

    def evict(self, nbytes: int, also: Collection[str]) -> int:
        """Drop others than these until so many bytes are free, if possible; return the bytes."""


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """A request's demands on the device."""

    key: Key
    samples: int
    forward: ForwardMemory
    weights: tuple[Weights, ...]
    smallest: int
    largest: int
    """COS batch."""


@dataclass(frozen=True)
class BatchBounds:
    """The COS batch that a request is to have, as far as memory allows."""

    smallest: int
    largest: int
    curve: Mapping[int, float] | None = None


@dataclass(eq=False)
class Reservation:
    """One request's part of the memory."""

    request: Request
    interest: Interest
    """Interest until whose deadline it waits."""
    since: float = field(default_factory=time.monotonic)
    batch: int = 0
    """COS batch; 0 while it waits."""
    held_bytes: int = 0
    """Bytes for its forward passes."""
    loading: tuple[Weights, ...] = ()
    """Its weights until they are known to be in use."""


class DeviceMemory:
    """The ledger of one device; thread-safe."""

    def __init__(self, budget: int, policy: str, resident: Resident) -> None:
        """Divide ``budget`` bytes for weights and forward passes by ``policy``
        (:mod:`hapi.server.batching.policies`).
        """
        self.budget = budget
        self._policy = policy
        self._resident = resident
        self._changed = threading.Condition()
        self._queue: list[Reservation] = []
        self._reserved: set[Reservation] = set()
        self._observed = ObservedMemory()
        self._curves = TimeCurves()
        self._forwards: dict[Key, ForwardMemory] = {}
        self._ids = itertools.count(1)
        self.adaptations = 0
        self.adapt_seconds = 0.0

    @contextmanager
    def reserve(self, wanted: MemoryRequest, interest: Interest) -> Iterator[Reservation]:
        """Hold memory for ``wanted`` inside the block, once it is free.

        Raises:
            DeviceMemoryError: even one sample does not fit the empty device.
            BusyError: the memory is not free at the deadline of ``interest``.
            BadRequestError: the client is gone.
        """
        reservation = Reservation(self._request(wanted), interest)
        check_fits(reservation.request, self.budget)
        with paused(), self._changed:
            self._queue.append(reservation)
            try:
                self._wait(reservation)
            except BaseException:
                self._leave(reservation)
                raise
        try:
            with when_given_up(lambda: self._forgo(reservation)):
                yield reservation
        finally:
            with self._changed:
                self._leave(reservation)

    def loaded(self, reservation: Reservation) -> None:
        """Note that the claim's weights are resident: their real size counts from now on."""
        with self._changed:
            reservation.loading = ()
            self._changed.notify_all()  # they may share much with what was there

    # -- what the device saw: hapi.server.device.device.PassMemory ------------------------------------------------

    def ceiling(self, key: Any, batch: int) -> int:
        """Return ``batch``, or less if as many samples ran out of memory before."""
        with self._changed:
            return self._observed.ceiling(key, batch)

    def out_of_memory(self, key: Any, batch: int) -> int:
        """Note that ``batch`` samples ran out of memory; return half of it."""
        with self._changed:
            return self._observed.out_of_memory(key, batch)

    def passed(self, key: Any, batch: int, seconds: float, peak_bytes: int | None) -> None:
        """Note that ``batch`` samples took ``seconds``; ``peak_bytes`` is beside weights, None if unknown."""
        with self._changed:
            if seconds > 0:
                self._curves.observe(key, batch, seconds)
            forward = self._forwards.get(key)
            if peak_bytes is None or peak_bytes < 1 or forward is None:
                self._observed.passed(key, batch)
            else:
                self._observed.observe(key, forward, batch, peak_bytes)

    # -- to look at ----------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that admitted requests may use beside weights."""
        with self._changed:
            return sum(c.held_bytes for c in self._reserved)

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget that are not free: resident weights, those being loaded, and what requests hold."""
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, int]:
        """Return those bytes by :data:`hapi.server.status.MEMORY_KINDS`."""
        with self._changed:
            coming = self._coming()
            resident = self._resident.prefix_bytes  # first: what comes between the two is not idle as well
            used, loaded = self._resident.in_use(coming)
            loading = sum(nbytes for key, nbytes in coming.items() if key not in loaded)
            return {
                "weights": used + loading,
                "idle_weights": max(0, resident - used),
                "activations": sum(c.held_bytes for c in self._reserved),
            }

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        with self._changed:
            return len(self._queue)

    def pressed(self) -> bool:
        """Return whether a request waits for memory that others hold, not just for company."""
        gathered = time.monotonic() - GATHER_SECONDS
        with self._changed:
            return any(reservation.since < gathered for reservation in self._queue)

    def report(self) -> MemoryReport:
        """Return the comparison of predictions with observed peaks."""
        with self._changed:
            return self._observed.report()

    # -- inside --------------------------------------------------------------------------------------------

    def _request(self, wanted: MemoryRequest) -> Request:
        with self._changed:
            self._remember(wanted)
            bounds = self._bounds(wanted)
            line = self._observed.line(wanted.key, wanted.forward, bounds.smallest, bounds.largest)
        return Request(
            id=str(next(self._ids)),
            samples=wanted.samples,
            sample_bytes=line.sample_bytes,
            fixed_bytes=line.fixed_bytes,
            weights=wanted.weights,
            smallest=bounds.smallest,
            largest=bounds.largest,
            curve=bounds.curve,
        )

    def _bounds(self, wanted: MemoryRequest) -> BatchBounds:
        largest = self._observed.ceiling(wanted.key, wanted.largest)
        if self._policy != "auto":
            return BatchBounds(min(wanted.smallest, largest), largest)
        smallest = min(wanted.smallest, largest)
        proposed = max(smallest, self._curves.propose(wanted.key, min(largest, wanted.samples)))
        curve = self._curves.curve(wanted.key)
        if curve is None:  # just what is being looked at
            return BatchBounds(proposed, proposed)
        return BatchBounds(smallest, proposed, curve)

    def _remember(self, wanted: MemoryRequest) -> None:
        self._forwards.pop(wanted.key, None)
        self._forwards[wanted.key] = wanted.forward
        if len(self._forwards) > 1024:
            del self._forwards[next(iter(self._forwards))]

    def _wait(self, reservation: Reservation) -> None:
        """Wait until ``reservation`` is admitted. Requests that come at about the same time share the free memory."""
        gathered = time.monotonic() + GATHER_SECONDS
        if self._all_fit():
            self._admit()
        while not self._admitted(reservation):
            left = gathered - time.monotonic()
            if left <= 0:
                self._admit()
                left = LOOK_SECONDS
            if not self._admitted(reservation):
                self._changed.wait(left)
            if reservation.interest.is_set():
                raise BadRequestError("the client went away")
            if not self._admitted(reservation) and time.monotonic() >= reservation.interest.deadline:
                raise BusyError(
                    f"{len(self._queue)} requests wait for the device's memory, and this one did for too long "
                    "(--max-request-seconds of hapi-server); come back later, or ask another server",
                    retry_after=LATE_SECONDS,
                )

    @staticmethod
    def _admitted(reservation: Reservation) -> bool:
        return reservation.batch > 0

    def _all_fit(self) -> bool:
        """Return whether all that wait can have their largest batch at once: then nobody gains by waiting for
        others.
        """
        wanted = sum(r.fixed_bytes + min(r.largest, r.samples) * r.sample_bytes for r in self._queued())
        wanted += sum(w.nbytes for r in self._queued() for w in r.weights)
        return wanted <= self.budget - self._state().held_bytes

    def _queued(self) -> Sequence[Request]:
        return [c.request for c in self._queue]

    def _state(self) -> DeviceState:
        coming = self._coming()
        used, loaded = self._resident.in_use(coming)
        loading = sum(nbytes for key, nbytes in coming.items() if key not in loaded)
        held = used + loading + sum(c.held_bytes for c in self._reserved)
        return DeviceState(budget_bytes=self.budget, held_bytes=held, resident=loaded | coming.keys())

    def _coming(self) -> dict[str, int]:
        """Bytes of weights that admitted requests are about to use, by key."""
        return {w.key: w.nbytes for c in self._reserved for w in c.loading}

    def _admit(self) -> None:
        began, state = time.monotonic(), self._state()
        found = adapt(self._policy, state, self._queued())
        self.adaptations += 1
        self.adapt_seconds += time.monotonic() - began
        if not found.batches:
            return
        self._grant(found)
        coming = self._coming()
        free = self.budget - self._state().held_bytes
        idle = self._resident.prefix_bytes - self._resident.in_use(coming)[0]
        if idle > free:
            self._resident.evict(idle - free, coming)
        self._changed.notify_all()

    def _grant(self, found: Adaptation) -> None:
        for reservation in [c for c in self._queue if c.request.id in found.batches]:
            request = reservation.request
            reservation.batch = found.batches[request.id]
            reservation.held_bytes = request.fixed_bytes + reservation.batch * request.sample_bytes
            reservation.loading = request.weights
            self._queue.remove(reservation)
            self._reserved.add(reservation)

    def _forgo(self, reservation: Reservation) -> None:
        """Its request was given up and passes no samples any more, even if its thread comes back only much later."""
        with self._changed:
            reservation.held_bytes = 0
            self._changed.notify_all()

    def _leave(self, reservation: Reservation) -> None:
        if reservation in self._queue:
            self._queue.remove(reservation)
        self._reserved.discard(reservation)
        self._changed.notify_all()
