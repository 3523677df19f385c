"""Checks of contents while their bytes are in the processor's cache."""

from __future__ import annotations

import threading

import xxhash

from hapi.models.graph.digest import ContentDigest

MAX_REMEMBERED = 1 << 18
"""Verified contents that a process remembers; beyond them it begins anew."""

Identity = tuple[str, str, int, str]
"""Store, object and first byte of a content, and its digest."""


class VerifiedContents:
    """Contents whose identity was verified in this process; thread-safe.

    Objects that hold tensors are never written again. A server that shares tensors between tenants by their digest
    computes it once for each, and the fast checksum afterwards.
    """

    def __init__(self) -> None:
        self._known: set[Identity] = set()
        self._lock = threading.Lock()

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._known

    def add(self, identity: Identity) -> None:
        """Remember that the bytes there have the digest."""
        with self._lock:
            if len(self._known) >= MAX_REMEMBERED:
                self._known = set()
            self._known.add(identity)


VERIFIED = VerifiedContents()
"""Those of this process."""


class ContentCheck:
    """The check of one content, whose parts may arrive in any order from several threads.

    A part that comes next is hashed by the thread that brought it, while its bytes are in that processor's cache.
    A part that comes early is hashed by whichever thread brought the one before it.
    """

    def __init__(self, nbytes: int, checksum: str, digest: str | None) -> None:
        """Begin.

        Args:
            nbytes: bytes of the content.
            checksum: xxh3-64 of it, 16 hex digits.
            digest: its SHA-256 digest, 32 hex digits, if that is to be verified too.
        """
        self._nbytes = nbytes
        self._checksum = checksum
        self._digest = digest
        self._found = xxhash.xxh3_64()
        self._own = None if digest is None else ContentDigest()
        self._early: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._hashing = False
        self.hashed = 0
        """Bytes from the first on that were hashed."""

    def add(self, start: int, data: memoryview) -> bool:
        """Add the bytes from ``start`` on; return whether this call hashed the last byte.

        They must stay as they are until :attr:`hashed` has passed them.
        """
        with self._lock:
            if self._hashing or start != self.hashed:
                self._early[start] = data
                return False
            self._hashing = True
        part: memoryview | None = data
        while part is not None:
            self._found.update(part)
            if self._own is not None:
                self._own.update(part)
            with self._lock:
                self.hashed += len(part)
                part = self._early.pop(self.hashed, None)
                self._hashing = part is not None
                complete = self.hashed == self._nbytes
        return complete

    @property
    def is_sound(self) -> bool:
        """Whether the bytes are those that were stored; only once they are complete."""
        same = self._found.hexdigest() == self._checksum
        return same and (self._own is None or self._own.hexdigest() == self._digest)
