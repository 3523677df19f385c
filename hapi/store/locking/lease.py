"""Steps of a lease: taking a lock, renewing it while it is held, noticing its loss, and giving it back.

A lock whose owner is seen to be dead is taken over at once. An owner that cannot be seen from here is watched
for its whole lease by this machine's own clock; if it gives no sign of life, the lock is taken over. Clocks
of two machines are never compared. The store alone decides whether a lock is still held, not a clock.

After a pause of any length a process cannot overwrite a successor's object or count as its holder. If the
pause falls between the last look and a removal while the lock is given back, it can remove the first object
of a later owner, which then finds its lock lost and stops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hapi.errors import ConflictError, HapiError, StoreError
from hapi.store.locking.locks import (
    FORCE,
    Lease,
    LeaseLostError,
    LockObjects,
    LockOwner,
    Seen,
    after_key,
    beat_key,
)

RENEWALS = 6
"""Signs of life during one lease."""
_LOOKS = 20
"""Looks at another's lock in the time of its lease."""
_LONGEST_PAUSE = 1.0
_MOST_TAKES = 50
"""Times that a lock is looked at anew because another process was faster, or because the store does not keep it."""
_MAX_CHAIN = 1000
"""Owners that died one after the other; a longer chain is no work of ours."""

log = logging.getLogger("hapi.store")


@dataclass(frozen=True)
class Timing:
    """The clock of this machine."""

    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    background: bool = True
    """Renew by a separate thread; otherwise the lease's holder calls :meth:`HeldLease.renew`."""


@dataclass(frozen=True)
class _Link:
    """One owner in the chain."""

    key: str
    owner: LockOwner
    seen: Seen


class HeldLease(Lease):
    """The end of a chain of owners, as long as no other follows."""

    def __init__(self, objects: LockObjects, lock: str, chain: Sequence[_Link]) -> None:
        self._objects = objects
        self._lock = lock
        self._chain = tuple(chain)
        self._mine = chain[-1]
        self._beat = 0
        self._guard = threading.Lock()
        self._lost: str | None = None

    def raise_if_lost(self) -> None:
        """Raise :class:`LeaseLostError` when the loss is known by now."""
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def check(self) -> None:
        """Renew the lease, and raise :class:`LeaseLostError` when it is lost."""
        self.renew()
        self.raise_if_lost()

    def renew(self) -> None:
        """Give a sign of life, then check whether another owner has taken the lock over."""
        with self._guard:
            if self._lost is not None:
                return
            self._beat += 1
            self._objects.renew(self._mine.key, self._mine.owner.id, self._beat)
            now = _chain(self._objects, self._lock)
            if not now or now[-1].owner.id != self._mine.owner.id:
                follower = f"taken over by {now[-1].owner}" if now else "removed by another"
                self._lost = (
                    f"{self._objects.where}: the lock of this process was {follower}, after no sign of life for "
                    f"{self._mine.owner.lease:g} s or by force; nothing more is written here, run it again if need be"
                )

    def release(self) -> None:
        """Remove the lock's objects, and those that dead owners left; a successor's stay."""
        names = (
            self._objects.names()
        )  # before the look: nothing in it can be of one that follows after the look
        self.renew()
        if self._lost is not None:
            self._objects.remove(beat_key(self._lock, self._mine.owner.id))
            return
        kept = {link.key for link in self._chain}
        for name in names:
            if name not in kept:
                self._objects.remove(name)
        for link in self._chain:  # the first one first: whoever follows looks at it last
            self._objects.remove(link.key)
        self._objects.remove(beat_key(self._lock, self._mine.owner.id))


@contextmanager
def held(
    objects: LockObjects,
    lock: str,
    *,
    force: bool = False,
    advice: str = FORCE,
    timing: Timing | None = None,
    lease: float | None = None,
) -> Iterator[HeldLease]:
    """Hold the lock while the block runs.

    Args:
        objects: the store's objects of this lock.
        lock: key of the first one.
        force: take it from an unknown owner without waiting.
        advice: how a person forces it, for the error.
        timing: this machine's clock.
        lease: seconds of this owner's lease (default: ``HAPI_STORE_LEASE``).

    Raises:
        ConflictError: a living owner holds it; the message names the owner.
    """
    timing = timing or Timing()
    mine = LockOwner.new(lease=lease)
    taken = HeldLease(objects, lock, _take(objects, lock, mine, force, advice, timing))
    stop = threading.Event()
    renewing = threading.Thread(target=_renew, args=(taken, mine.lease, stop), name="hapi-lease", daemon=True)
    if timing.background:
        renewing.start()
    try:
        yield taken
    finally:
        stop.set()
        if timing.background:
            renewing.join()
        try:
            taken.release()
        except HapiError as error:  # what it guarded is done or has failed for its own reason
            log.warning("%s: the lock could not be given back: %s", objects.where, error)


def may_be_held(objects: LockObjects, lock: str) -> bool:
    """Return whether the lock has an owner that is not seen to be dead; nothing is changed, nor waited for."""
    chain = _chain(objects, lock)
    return bool(chain) and objects.lives(chain[-1].key, chain[-1].owner) is not False


def _renew(lease: HeldLease, seconds: float, stop: threading.Event) -> None:
    """Give signs of life until told to stop; one that fails is followed by the next."""
    while not stop.wait(seconds / RENEWALS):
        try:
            lease.renew()
            lease.raise_if_lost()
        except LeaseLostError as error:
            log.warning("%s", error)
            return
        except HapiError as error:
            log.debug("a lock could not be renewed, which is tried again: %s", error)


def _chain(objects: LockObjects, lock: str) -> list[_Link]:
    """The lock's owners from the first on; the last one is the holder."""
    links: list[_Link] = []
    key = lock
    while (seen := objects.read(key)) is not None:
        owner = LockOwner.from_bytes(seen.document)
        links.append(_Link(key, owner, seen))
        if len(links) > _MAX_CHAIN:
            raise StoreError(f"{objects.where}: the lock {lock} has no end; remove its objects")
        key = after_key(lock, owner.id)
    return links


def _take(
    objects: LockObjects, lock: str, mine: LockOwner, force: bool, advice: str, timing: Timing
) -> list[_Link]:
    """The chain that ends with us."""
    for _ in range(_MOST_TAKES):
        chain = _chain(objects, lock)
        if not chain:
            key = lock
        else:
            end = _ended(objects, lock, chain[-1], force, advice, timing)
            if end is None:
                continue
            key = after_key(lock, end.owner.id)
        if not objects.create(key, mine.to_bytes()):
            continue
        # Between our look and our object the lock may have been given back, and taken by another since.
        chain = _chain(objects, lock)
        if chain and chain[-1].owner.id == mine.id:
            return chain
        if key != lock:
            objects.remove(key)
        mine = mine.renamed()
    raise StoreError(
        f"{objects.where}: the lock {lock} changes all the time, or the store does not keep it; run the same again"
    )


def _ended(
    objects: LockObjects, lock: str, end: _Link, force: bool, advice: str, timing: Timing
) -> _Link | None:
    """The holder when it may be followed; None when the lock has changed and is to be looked at again."""
    lives = objects.lives(end.key, end.owner)
    if lives is False:
        return end
    if lives and (objects.forces_the_living or not force):
        if force:
            return end
        raise _being_written(objects, end.owner, advice)
    if lives:
        raise ConflictError(f"{objects.where} is being written by {end.owner}; wait until it is done")
    if force:
        return end
    return _watched(objects, lock, end, advice, timing)


def _watched(objects: LockObjects, lock: str, end: _Link, advice: str, timing: Timing) -> _Link | None:
    """Watch a holder that cannot be seen from here for the whole of its lease."""
    began = timing.clock()
    log.warning(
        "waiting for %s: its lock is held by %s, for up to %g s unless that shows a sign of life",
        objects.where, end.owner, end.owner.lease,
    )  # fmt: skip
    while True:
        timing.pause(min(_LONGEST_PAUSE, end.owner.lease / _LOOKS))
        looked = timing.clock()
        chain = _chain(objects, lock)
        if not chain:
            return None
        if chain[-1].owner.id != end.owner.id or chain[-1].seen != end.seen:
            raise _being_written(objects, chain[-1].owner, advice)
        if objects.lives(end.key, end.owner) is False or looked - began >= end.owner.lease:
            return end


def _being_written(objects: LockObjects, owner: LockOwner, advice: str) -> ConflictError:
    return ConflictError(
        f"{objects.where} is being written by {owner}; wait until it is done, or {advice} when you know that it is dead"
    )
