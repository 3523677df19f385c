"""Agreement between pushes and the collection of packs: no pack goes that a running push relies on.

    STORE/repository/pushes/ID.lock     held while the push runs
    STORE/repository/journal/           packs and the structure that it uses or writes (``journal.py``)
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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hapi.errors import ConflictError, NoRoomError, NotFoundError
from hapi.repository.packs.journal import Needed, append, push_lock
from hapi.repository.versions import document_of
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import Lease

CONDEMNED, COLLECTION = "repository/condemned.json", "repository/gc.lock"


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

    def __init__(self, store: ObjectStore, push: str, lease: Lease) -> None:
        self._store = store
        self._id = push
        self.lease = lease

    def needs(self, packs: Collection[str], structures: Collection[str]) -> Condemned:
        """Say that the push also needs packs of these ids, and structures by digest; return what is condemned."""
        append(self._store, {"push": self._id, "packs": sorted(packs), "structures": sorted(structures)})
        return condemned(self._store)

    def writes(self, name: str, version: int) -> None:
        """Say that the push is about to write this version, unless another one has its number."""
        append(self._store, {"push": self._id, "name": name, "version": version})


@contextmanager
def running(store: ObjectStore) -> Iterator[RunningPush]:
    """Run a push inside the block. Any number may run at a time."""
    push = secrets.token_hex(12)
    with store.lock(push_lock(push)) as lease:
        yield RunningPush(store, push, lease)


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
    return Condemned(Needed.from_json(document_of(store, CONDEMNED, data, "run 'hapi gc' again")))


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


def remove_dead_locks(store: ObjectStore, folder: str, ending: str) -> None:
    """Remove the locks in ``folder`` whose keys end so, and whose owners are dead."""
    keys = store.list_keys(folder)
    for lock in sorted(
        {f"{name}{ending}" for name, found, _ in (key.partition(ending) for key in keys) if found}
    ):
        with suppress(ConflictError), store.lock(lock):  # its holder removes all of it in the end
            pass
