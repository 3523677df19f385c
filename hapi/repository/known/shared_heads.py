"""Headers of a remote store's packs, together in the store: a machine that knows none reads few objects.

    STORE/repository/heads/00000003-000041.log    41 records (:mod:`hapi.repository.known.record_log`): headers by id

Whoever knows :data:`MIN_ADDED` headers that are not in there adds an object with them, and joins several objects.
Nothing relies on these objects: a pack's id is the digest of its header, so that no other one is believed, and what is
damaged or gone is read from the pack. No failure of the store to take them is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from hapi.errors import ConflictError, DataError, HapiError, NotFoundError
from hapi.models.graph.digest import content_digest
from hapi.repository.known.record_log import decoded, encoded
from hapi.repository.known.side_by_side import side_by_side
from hapi.store.base import ObjectStore

HEADS = "repository/heads"
MIN_ADDED = 32
"""Headers that are added at a time: reading so many one by one takes as long as writing them once."""
MOST_OBJECTS = 8
"""Small objects, half full at most, beyond which they are put together."""
MOST_BYTES = 16 << 20
"""Bytes of one object, but for a longer header."""
_TRIES = 20
_NAME = re.compile(r"([0-9]{8})-([0-9]{6})\.log")


class SharedHeads:
    """Headers by pack's id as the store has them together, of the packs of ``present``."""

    def __init__(self, store: ObjectStore, present: Collection[str]) -> None:
        """Look which objects there are; none is read, and there are none for few packs."""
        self._store, self._present = store, present
        infos = store.list(HEADS) if len(present) >= MIN_ADDED else []
        self._sizes = {info.key: info.size for info in infos if _named(info.key)[1]}
        self._found: dict[str, dict[str, bytes]] = {}
        """Headers by the object's key, once they are read."""

    @property
    def is_behind(self) -> bool:
        """Whether many headers must be missing in them, or have never been added."""
        return len(self._present) - sum(_named(key)[1] for key in self._sizes) >= MIN_ADDED

    def read(self) -> dict[str, bytes]:
        """Return the headers of present packs; one that is not what its pack's name says is left out."""
        found = side_by_side(self._store, self._read, self._sizes)
        self._found = dict(zip(self._sizes, found, strict=True))
        return _joined(self._found.values())

    def _read(self, key: str) -> dict[str, bytes]:
        try:
            records = decoded(self._store.get(key))
        except (NotFoundError, DataError):  # put together with others since, or too long
            return {}
        sound = (pack for pack, header in records.items() if content_digest(header) == pack)
        return {pack: records[pack] for pack in sound if pack in self._present}

    def add(self, known: Mapping[str, bytes]) -> None:
        """Add the headers of present packs that are ``known``, and that none of the objects has, if they are many."""
        shared = _joined(self._found.values())
        more = {pack: known[pack] for pack in known.keys() - shared.keys() if pack in self._present}
        if len(more) < MIN_ADDED:
            return
        small = [key for key, size in self._sizes.items() if size < MOST_BYTES // 2]
        old = small if len(small) >= MOST_OBJECTS else []
        with suppress(HapiError):  # no room, or no right to
            for records in _divided(_joined(self._found.get(key, {}) for key in old) | more):
                self._write(records)
            for key in old:
                self._store.delete(key)

    def _write(self, records: Mapping[str, bytes]) -> None:
        first = max((_named(key)[0] for key in self._sizes), default=0) + 1
        data = encoded(records)
        for number in range(first, first + _TRIES):
            if self._store.put_new(f"{HEADS}/{number:08}-{len(records):06}.log", data):
                return
        raise ConflictError(
            f"{self._store.url}/{HEADS}: many others add to it just now"
        )  # so nothing is removed


def _named(key: str) -> tuple[int, int]:
    """Number of an object, and that of its headers; both are 0 for a key of another kind."""
    found = _NAME.fullmatch(key.rpartition("/")[2])
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _joined(parts: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    return {pack: header for part in parts for pack, header in part.items()}


def _divided(records: Mapping[str, bytes]) -> Iterator[Mapping[str, bytes]]:
    part: dict[str, bytes] = {}
    room = MOST_BYTES
    for pack, header in records.items():
        nbytes = len(encoded({pack: header}))
        if part and nbytes > room:
            yield part
            part, room = {}, MOST_BYTES
        part[pack], room = header, room - nbytes
    if part:
        yield part


def forget_heads(store: ObjectStore) -> None:
    """Remove all objects of headers: the store has no pack any more."""
    for key in store.list_keys(HEADS):
        store.delete(key)
