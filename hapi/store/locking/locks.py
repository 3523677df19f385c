"""A lock of one writer over a name in a store, kept as a lease: its objects, their owners, and its questions.

    KEY                 the first owner
    KEY.after-ID        the owner that took the lock over from owner ID, which was dead or showed no life for its lease
    KEY.beat-ID         a count that owner ID raises while it lives (in a local folder: in the owner's own object)

The holder is the owner at the end of the chain that begins at KEY. Owners' objects are only ever created
where none exists, which every store can do, and each id is used once, so that a writer that was paused cannot
overwrite anything of its successor. ``lease.py`` has the steps, ``lock_objects.py`` the storage.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, Self

from hapi.errors import ConflictError
from hapi.living import ProcessIdentity
from hapi.units import environment_number
from hapi.wire.documents import parse_document

FORCE = "pass --force-lock"
"""Advice for taking a lock whose owner cannot be seen to be dead, in a command that has this flag."""
LEASE_SECONDS = 60.0
"""Seconds without a sign of life from its owner after which a lock may be taken over."""
LEASE_VARIABLE = "HAPI_STORE_LEASE"
_LEAST_LEASE, _LONGEST_LEASE = 1.0, 3600.0


def is_lock_object(key: str, lock: str) -> bool:
    """Return whether object ``key`` belongs to the lock ``lock``; only its holders and takers write or remove
    it.
    """
    return key == lock or key.startswith(f"{lock}.")


def after_key(lock: str, owner: str) -> str:
    """Return the key of the owner that took ``lock`` over from the owner of id ``owner``."""
    return f"{lock}.after-{owner}"


def beat_key(lock: str, owner: str) -> str:
    """Return the key of the object in which the owner of id ``owner`` counts its signs of life."""
    return f"{lock}.beat-{owner}"


def lease_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return the lease of this process's locks in seconds: ``HAPI_STORE_LEASE``, 1 to 3600, 60 by default."""
    return environment_number(environment, LEASE_VARIABLE, LEASE_SECONDS, _LEAST_LEASE, _LONGEST_LEASE)


@dataclass(frozen=True)
class LockOwner:
    """Owner of a lock, as the lock's object describes it."""

    id: str
    """Random; used once."""
    process: ProcessIdentity | None
    """None for an owner that cannot be read: never known to be dead, and alive only by its signs of life."""
    lease: float
    """Seconds after which it counts as dead without a sign of life."""

    @classmethod
    def new(cls, lease: float | None = None) -> Self:
        """Return this process as an owner with a new id."""
        seconds = lease_seconds() if lease is None else lease
        return cls(secrets.token_hex(12), ProcessIdentity.current(), seconds)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a lock's object; anything malformed has an unknown owner, with an id made of the content."""
        try:
            document = parse_document(data)
            owner, lease = document["id"], document["lease"]
            if not isinstance(owner, str) or len(owner) != 24 or set(owner) - set("0123456789abcdef"):
                raise ValueError("no id")
            process = ProcessIdentity.from_json(document["process"])
            seconds = min(max(float(lease), _LEAST_LEASE), _LONGEST_LEASE)
            return cls(owner, process, seconds)
        except (ValueError, KeyError, TypeError, OverflowError):
            return cls(blake2b(data, digest_size=12).hexdigest(), None, LEASE_SECONDS)

    def to_bytes(self) -> bytes:
        """Return the owner as one line of JSON."""
        process = None if self.process is None else self.process.to_json()
        return json.dumps({"id": self.id, "process": process, "lease": self.lease}).encode()

    def renamed(self) -> Self:
        """Return the same process under a new id, for another try."""
        return replace(self, id=secrets.token_hex(12))

    def lives(self) -> bool | None:
        """Return whether its process lives, where that can be seen from here."""
        return None if self.process is None else self.process.lives()

    def __str__(self) -> str:
        return "an unknown process" if self.process is None else str(self.process)


@dataclass(frozen=True)
class Seen:
    """A lock's object as it was read: its owner's document, and the count of its signs of life."""

    document: bytes
    beat: bytes


class LockObjects(Protocol):
    """Storage of the objects of one lock."""

    where: str
    """Location of the lock, for messages."""
    forces_the_living: bool
    """True when ``force`` also takes a lock from an owner that is seen to live."""

    def create(self, key: str, document: bytes) -> bool:
        """Write the object unless it exists; return whether the present one is ours."""

    def read(self, key: str) -> Seen | None:
        """Return the present object; None when there is none."""

    def renew(self, key: str, owner: str, beat: int) -> None:
        """Set the count of signs of life of our own object ``key`` to ``beat``."""

    def lives(self, key: str, owner: LockOwner) -> bool | None:
        """Return whether the object's owner lives; None when that cannot be seen from here."""

    def names(self) -> list[str]:
        """Return the keys of all the lock's objects that the store's listing knows."""

    def remove(self, key: str) -> None:
        """Remove an object, if it exists."""


class Lease(Protocol):
    """A lock that is held; made by :meth:`hapi.store.base.ObjectStore.lock`."""

    def raise_if_lost(self) -> None:
        """Raise :class:`LeaseLostError` when the loss is known by now; cheap, since nothing is read."""

    def check(self) -> None:
        """Give a sign of life and look in the store; :class:`LeaseLostError` unless the lock is still held."""


class LeaseLostError(ConflictError):
    """Another process has taken the lock over; the guarded objects may not be written any more."""

    slug, title = "lease-lost", "Lock lost"
