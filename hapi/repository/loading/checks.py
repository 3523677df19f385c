"""Checks of contents while their bytes are in the processor's cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import xxhash

from hapi.models.graph.digest import ContentDigest
from hapi.repository.checksums import CHECKED_BYTES, joined

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


class _Chain:
    """Bytes that are hashed one after another, though they may arrive in any order from several threads."""

    def __init__(self, update: Callable[[memoryview], None]) -> None:
        self._update = update
        self._early: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._hashing = False
        self.hashed = 0
        """Bytes from the first on that were hashed."""

    def add(self, start: int, data: memoryview) -> int:
        """Add the bytes from ``start`` on; return the number of bytes that this call hashed."""
        with self._lock:
            if self._hashing or start != self.hashed:
                self._early[start] = data
                return 0
            self._hashing = True
        part: memoryview | None = data
        while part is not None:
            self._update(part)
            with self._lock:
                self.hashed += len(part)
                end = self.hashed
                part = self._early.pop(end, None)
                self._hashing = part is not None
        return end - start


class ContentCheck:
    """The check of one content, whose parts may arrive in any order from several threads.

    Pieces of the checksum are hashed side by side. Within a piece, a part that comes next is hashed by the thread that
    brought it, while its bytes are in that processor's cache. A part that comes early is hashed by whichever thread
    brought the one before it. A digest is one chain over all bytes.
    """

    def __init__(self, nbytes: int, checksum: str, digest: str | None) -> None:
        """Begin.

        Args:
            nbytes: bytes of the content.
            checksum: that of a tensor (:func:`hapi.repository.checksums.joined`), 16 hex digits.
            digest: its SHA-256 digest, 32 hex digits, if that is to be verified too.
        """
        self._checksum = checksum
        self._digest = digest
        self._found = [xxhash.xxh3_64() for _ in range(0, nbytes, CHECKED_BYTES)]
        self._pieces = [_Chain(found.update) for found in self._found]
        self._own = None if digest is None else ContentDigest()
        self._whole = None if self._own is None else _Chain(self._own.update)
        self._lock = threading.Lock()
        self._left = nbytes if digest is None else 2 * nbytes
        """Bytes that are still to be hashed, for the checksum and for the digest."""

    def add(self, start: int, data: memoryview) -> bool:
        """Add the bytes from ``start`` on; return whether this call completed the check.

        They must stay as they are until :meth:`is_hashed` says that they were hashed.
        """
        hashed = sum(
            chain.add(begin, data[first:last]) for chain, begin, first, last in self._cut(start, len(data))
        )
        if self._whole is not None:
            hashed += self._whole.add(start, data)
        if not hashed:
            return False
        with self._lock:
            self._left -= hashed
            return not self._left

    def is_hashed(self, start: int, stop: int) -> bool:
        """Return whether the bytes ``start..stop`` (stop excluded) were hashed."""
        pieces = self._cut(start, stop - start)
        if any(chain.hashed < begin + last - first for chain, begin, first, last in pieces):
            return False
        return self._whole is None or self._whole.hashed >= stop

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[_Chain, int, int, int]]:
        """Piece after piece of bytes: its chain, the first byte in it, and the first and last (excluded) of them."""
        first = 0
        while first < nbytes:
            number, begin = divmod(start + first, CHECKED_BYTES)
            last = min(nbytes, first + CHECKED_BYTES - begin)
            yield self._pieces[number], begin, first, last
            first = last

    @property
    def is_sound(self) -> bool:
        """Whether the bytes are those that were stored; only once they are complete."""
        same = joined(self._found).hexdigest() == self._checksum
        return same and (self._own is None or self._own.hexdigest() == self._digest)
