"""The chunk cache: one bounded buffer, cut into slots of one size, that all datasets of a process share.

DLFS's sample cache (section III-C). Everything is an array, so that a request for thousands of samples takes
a few vectorised steps under the lock and no Python object per sample or chunk.

A slot's life:

    free --claim--> loading --publish(ok)--> ready --claim of another chunk, once unused--> loading
                    loading --publish(failed)--> free (its chunk is forgotten; waiting threads read for themselves)

Chunks that an epoch needs again much later are kept (:meth:`ChunkCache.keep`), for as long as others can be
taken.

A claim holds its slots until it is released, so a slot is never replaced while it is copied from. A thread
that claims a chunk which another thread is loading waits for it. It publishes its own loads before it waits,
so there is no circle of waiting.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from hapi.arrays import Flags, IntArray
from hapi.waiting import wait

_FREE, _LOADING, _READY = 0, 1, 2
ABSENT = -1
_KEPT_PART = 3


class Area:
    """The chunks of one dataset: which slot each is in. Made by :meth:`ChunkCache.area`."""

    def __init__(self, chunks: int) -> None:
        self.slot_of = np.full(chunks, ABSENT, dtype=np.int32)


@dataclass(frozen=True)
class SlotReservation:
    """Slots held for n chunks of an area, until :meth:`ChunkCache.release`."""

    slots: IntArray
    """int64 [n]; ``ABSENT`` for a chunk that was not wanted, or for which there was no slot."""
    mine: Flags
    """bool [n]: the claimer must load these, and publish them."""


class ChunkCache:
    """At most ``budget`` bytes in slots of ``slot_bytes``; thread-safe. Memory is taken when slots are filled."""

    def __init__(self, budget: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = budget // slot_bytes
        self.data = np.empty(self.slots * slot_bytes, dtype=np.uint8)
        """Slot s is ``data[s * slot_bytes:(s + 1) * slot_bytes]``; written only by who loads it."""
        self._state = np.zeros(self.slots, dtype=np.int8)
        self._users = np.zeros(self.slots, dtype=np.int32)
        self._used = np.zeros(self.slots, dtype=np.int64)
        self._until = np.zeros(self.slots, dtype=np.int64)
        """Value of ``_loads`` up to which other slots are taken first."""
        self._loads = 0
        self._chunk = np.zeros(self.slots, dtype=np.int64)
        self._area: list[Area | None] = [None] * self.slots
        self._clock = 0
        self._changed = threading.Condition()

    def slot(self, number: int, head: int) -> memoryview:
        """The bytes of one slot from place ``head`` of ``data`` on, for its loader."""
        return self.data.data[head : (number + 1) * self.slot_bytes]

    def reserve(self, area: Area, chunks: IntArray, wanted: Flags) -> SlotReservation:
        """Hold the slots of ``chunks`` (distinct), and take slots for the ``wanted`` ones that have none.

        The least recently used free slots are taken, those of :meth:`keep` last. Without a free slot a chunk
        stays ``ABSENT``.

        Args:
            area: the dataset's area.
            chunks: numbers of chunks, int64 [n].
            wanted: chunks worth loading, bool [n].
        """
        with self._changed:
            slots = area.slot_of[chunks].astype(np.int64)
            loaded = slots[slots != ABSENT]
            self._users[loaded] += 1
            missing = np.flatnonzero(wanted & (slots == ABSENT))
            taken = self._idle(len(missing))
            missing = missing[: len(taken)]
            self._assign(area, chunks[missing], taken)
            slots[missing] = taken
            mine = np.zeros(len(chunks), dtype=np.bool_)
            mine[missing] = True
            self._clock += 1
            self._used[slots[slots != ABSENT]] = self._clock
            return SlotReservation(slots, mine)

    def _idle(self, count: int) -> IntArray:
        """At most ``count`` free slots, the least recently used ones."""
        idle = np.flatnonzero(self._users == 0)
        if count < len(idle):
            used = np.where(self._until > self._loads, self._used + self._clock, self._used)[idle]
            idle = idle[np.argpartition(used, count)[:count]] if count else idle[:0]
        return idle

    def _assign(self, area: Area, chunks: IntArray, slots: IntArray) -> None:
        for slot in slots.tolist():
            self._forget(slot)
            self._area[slot] = area
        self._chunk[slots] = chunks
        self._state[slots] = _LOADING
        self._users[slots] = 1
        self._until[slots] = 0
        self._loads += len(slots)
        area.slot_of[chunks] = slots

    def _forget(self, slot: int) -> None:
        area = self._area[slot]
        if area is not None:
            area.slot_of[self._chunk[slot]] = ABSENT
        self._area[slot] = None
        self._state[slot] = _FREE

    def forget(self, area: Area) -> None:
        """Free the slots of ``area``, whose chunks are not needed any more, but those that are held."""
        with self._changed:
            for slot in np.flatnonzero(self._users == 0).tolist():
                if self._area[slot] is area:
                    self._forget(slot)
                    self._used[slot] = self._until[slot] = 0

    def keep(self, slots: IntArray, loads: int) -> None:
        """Keep these slots, which the caller holds, until ``loads`` more chunks are loaded.

        At most a third of the cache is kept; beyond that the least recently used slots are not.
        """
        with self._changed:
            self._until[slots] = self._loads + loads
            kept = np.flatnonzero(self._until > self._loads)
            excess = len(kept) - self.slots // _KEPT_PART
            if excess > 0:
                self._until[kept[np.argsort(self._used[kept], kind="stable")[:excess]]] = 0

    def publish(self, slots: IntArray, sound: Flags) -> None:
        """End the loads of these slots; ``sound`` says which are good. They stay held until the release."""
        with self._changed:
            self._state[slots[sound]] = _READY
            for slot in slots[~sound].tolist():
                self._forget(slot)
            self._changed.notify_all()

    def wait(self, reservation: SlotReservation) -> IntArray:
        """Return the reservation's slots once all of them are published; ``ABSENT`` for failed loads.

        Raises:
            StoreUnavailableError: the work was given up while another thread's load did not come.
        """
        held = np.flatnonzero(reservation.slots != ABSENT)
        slots = reservation.slots.copy()
        with self._changed:
            while bool((self._state[slots[held]] == _LOADING).any()):
                wait(self._changed)
            failed = held[self._state[slots[held]] != _READY]
        slots[failed] = ABSENT
        return slots

    def release(self, reservation: SlotReservation) -> None:
        """End the use of the reservation's slots."""
        with self._changed:
            self._users[reservation.slots[reservation.slots != ABSENT]] -= 1
