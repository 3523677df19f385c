"""Owners of locks: one that lives here, one that is dead, and one on a machine that nobody here can see."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

from hapi.living import ProcessIdentity
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.locking.locks import LockOwner, beat_key


def dead() -> LockOwner:
    """A process of this namespace that is no more: its id is another's now."""
    own = LockOwner.new()
    assert own.process is not None
    return replace(own, process=replace(own.process, started=own.process.started + 1))


def elsewhere(lease: float = 1.0) -> LockOwner:
    """A process of another machine, with a lease of so many seconds."""
    return replace(LockOwner.new(lease), process=ProcessIdentity("another-host", "0" * 32, 7, 1, 1))


@contextlib.contextmanager
def living_elsewhere(store: ObjectStore, lock: str) -> Iterator[None]:
    """A process of another machine has the lock, and shows signs of life."""
    owner, stop = elsewhere(2.0), threading.Event()
    store.put(lock, owner.to_bytes())

    def live() -> None:
        beat = 0
        while not stop.wait(0.05):
            beat += 1
            if isinstance(store, LocalStore):
                store.put(lock, owner.to_bytes() + b"\n%d" % beat)
            else:
                store.put(beat_key(lock, owner.id), b"%d" % beat)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
