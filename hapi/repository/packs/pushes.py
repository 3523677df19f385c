"""Agreement between pushes and the collection of packs: no pack goes that a running push relies on.

    STORE/repository/pushes/ID.lock     held while the push runs
    STORE/repository/pushes/ID.json     packs and the structure that it uses or writes
    STORE/repository/condemned.json     packs and structures that a collection is about to remove; empty, where there
                                        was no room for their names: anything
    STORE/repository/gc.lock            held while the collection runs

A push says first what it needs, and then looks at what is condemned. A collection says first what it condemns, and
then looks at what is needed. So at least one of the two sees the other, whatever the order: the push stores a condemned
pack's content again (for a structure, whose name cannot differ, and where anything may go, it waits, unless the
collection is dead), the collection spares what is needed. Brings no torch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hapi.errors import ConflictError, DataError, HapiError, NoRoomError, NotFoundError
from hapi.repository.packs.place import PACK_PATTERN
from hapi.repository.versions import document_of, read_document
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import Lease

PUSHES, CONDEMNED = "repository/pushes", "repository/condemned.json"
COLLECTION = "repository/gc.lock"


@dataclass(frozen=True)
class Needed:
    """Objects that must not be removed."""

    packs: frozenset[str] = frozenset()
    """Ids."""
    structures: frozenset[str] = frozenset()
    """Digests."""


@dataclass(frozen=True)
class Condemned:
    """Objects that a collection is about to remove."""

    ids: Needed = field(default_factory=Needed)
    is_everything: bool = False
    """Whether they are not known, so that any object that nothing needs may be among them."""

    def has_structure(self, digest: str) -> bool:
        """Return whether the structure of this digest may go, for which a push has to wait."""
        return self.is_everything or digest in self.ids.structures


class RunningPush:
    """A push that is known to collections; made by :func:`running`."""

    def __init__(self, store: ObjectStore, key: str, lease: Lease) -> None:
        self._store = store
        self._key = key
        self.lease = lease

    def needs(self, packs: Collection[str], structure: str) -> Condemned:
        """Say that the push needs packs of these ids, and a structure by its digest; return what is condemned."""
        needed = {"packs": sorted(packs), "structures": [structure]}
        self._store.put(self._key, json.dumps(needed).encode())
        return condemned(self._store)


@contextmanager
def running(store: ObjectStore) -> Iterator[RunningPush]:
    """Run a push inside the block. Any number may run at a time."""
    name = f"{PUSHES}/{secrets.token_hex(12)}"
    with store.lock(f"{name}.lock") as lease:
        try:
            yield RunningPush(store, f"{name}.json", lease)
        finally:
            with suppress(HapiError):  # a collection removes what is left of a push that does not live
                store.delete(f"{name}.json")


def condemn(store: ObjectStore, ids: Needed) -> None:
    """Say what a collection is about to remove; on a full disk no more than that it is."""
    document = {"packs": sorted(ids.packs), "structures": sorted(ids.structures)}
    try:
        store.put(CONDEMNED, json.dumps(document).encode())
    except NoRoomError:
        store.put(CONDEMNED, b"")


def condemned(store: ObjectStore) -> Condemned:
    """Return what a collection is about to remove."""
    try:
        data = store.get(CONDEMNED)
    except NotFoundError:
        return Condemned()
    if not data:
        return Condemned(is_everything=True)
    return Condemned(_ids(document_of(store, CONDEMNED, data, "run 'hapi gc' again")))


def spare_condemned(store: ObjectStore) -> bool:
    """Let nothing be condemned any more where a collection died; return False while one runs."""
    try:
        with store.lock(COLLECTION) as lease:
            if store.exists(CONDEMNED):
                lease.check()
                store.delete(CONDEMNED)
    except ConflictError:
        return False
    return True


def needed_by_pushes(store: ObjectStore, *, clean: bool) -> Needed:
    """Return what running pushes need.

    Args:
        store: of the packs.
        clean: remove what is left of pushes that do not live.
    """
    found = Needed()
    for key in store.list_keys(PUSHES):
        if not key.endswith(".json"):
            continue
        damage: DataError | None = None
        try:
            ids = _ids(read_document(store, key, "wait for that push, and run 'hapi gc' again"))
        except NotFoundError:
            continue  # it ended since the listing, with its version written
        except DataError as error:
            ids, damage = Needed(), error
        try:
            with store.lock(f"{key.removesuffix('.json')}.lock"):
                if clean:
                    store.delete(key)
        except ConflictError:  # it lives
            if damage is not None:
                raise damage from None
            found = Needed(found.packs | ids.packs, found.structures | ids.structures)
    return found


def remove_dead_locks(store: ObjectStore, folder: str) -> None:
    """Remove the locks in ``folder`` whose owners are dead, but those of dead pushes that said what they need."""
    keys = store.list_keys(folder)
    locks = {f"{name}.lock" for name, dot, _ in (key.partition(".lock") for key in keys) if dot}
    for lock in sorted(locks - {f"{key.removesuffix('.json')}.lock" for key in keys}):
        with suppress(ConflictError), store.lock(lock):  # its holder removes all of it in the end
            pass


def _ids(document: Mapping[str, Any]) -> Needed:
    return Needed(*(_listed(document.get(field)) for field in ("packs", "structures")))


def _listed(value: object) -> frozenset[str]:
    ids = value if isinstance(value, list) else []
    return frozenset(text for text in ids if isinstance(text, str) and PACK_PATTERN.fullmatch(text))
