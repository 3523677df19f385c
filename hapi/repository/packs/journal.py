"""Journal of pushes: what each relies on, and the versions that it writes, in objects whose numbers have no gaps.

    STORE/repository/journal/00000001.json    {"push", "packs", "structures"}: needs of a push
                                              {"push", "name", "version"}: the version that it writes next
                                              {"created", "versions"}: a sum, of all versions before it
                                              {"moved", "digest", "packs"}: key and digest of a version, and the packs
                                              that it uses from now on
    STORE/repository/pushes/ID.lock           held while the push runs
    STORE/repository/names/NAME.json          there before the first version of NAME is, and for ever

A store's listing may be behind: Swift's lacks what was written while a node was down. An object is found by its key all
the same. So the journal is read by number, from each that is listed until one is missing, and a collection sees each
push and each version. Every entry is written once. Those before a sum that has been listed for a day are removed: no
listing is as far behind as that. Brings no torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hapi.errors import BadRequestError, ConflictError, DataError, NoRoomError, NotFoundError, StoreError
from hapi.repository.known.entries import KnownEntries
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.packs.place import PACK_PATTERN
from hapi.repository.versions import document_of, list_versions, version_key
from hapi.store.base import ObjectStore
from hapi.wire.documents import check_int
from hapi.wire.references import check_name

JOURNAL, PUSHES = "repository/journal", "repository/pushes"
KEPT_SECONDS = 24 * 3600.0
"""Age of a sum before which no listing may be relied on to have it."""
_NUMBER, _PUSH = re.compile("[0-9]{8}"), re.compile("[0-9a-f]{24}")
_MAX_HIDDEN = 100_000
"""Entries that a listing may lack."""
_REMEDY = "wait until no push runs, and run 'hapi gc' again"


@dataclass(frozen=True)
class Needed:
    """Objects that must not be removed."""

    packs: frozenset[str] = frozenset()
    """Ids."""
    structures: frozenset[str] = frozenset()
    """Digests."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Needed:
        """Return the ids in ``document``; what is none is left out."""
        return cls(*(_ids(document.get(field)) for field in ("packs", "structures")))


@dataclass(frozen=True)
class _Entry:
    push: str = ""
    """Id of the push; empty for a sum, or damage."""
    needed: Needed = field(default_factory=Needed)
    versions: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Numbers of versions by the model's name."""
    created: float | None = None
    """Seconds since 1970, of a sum."""
    moved: tuple[str, str] | None = None
    """Key and digest of a version whose tensors are in the needed packs now."""
    damage: DataError | None = None


def append(store: ObjectStore, document: Mapping[str, Any]) -> None:
    """Add an entry behind the last one."""
    data = json.dumps(document).encode()
    first = max(_listed(store), default=0) + 1
    for number in range(first, first + _MAX_HIDDEN):
        if store.put_new(_key(number), data):
            return
    raise StoreError(
        f"{store.url}/{JOURNAL}: the listing lacks more than {_MAX_HIDDEN} objects; try again later"
    )


def moved_entry(key: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry that says which packs a version uses from now on, given its key and its document."""
    return {"moved": key, "digest": document.get("digest"), "packs": document["packs"]}


def note_name(store: ObjectStore, name: str) -> None:
    """Note that there may be versions of ``name`` from now on."""
    store.put_new(_name_key(name), json.dumps({"name": name}).encode())


def written_versions(store: ObjectStore, name: str) -> list[int]:
    """Return the versions of ``name`` that pushes wrote and that are there, in order, whatever the listing has.

    Nothing is read for a name that was never pushed.
    """
    if not store.exists(_name_key(name)):
        return []
    with KnownEntries(store) as known:
        journal = Journal(store, known)
        journal.read()
    return sorted(n for n in journal.versions.get(name, ()) if store.exists(version_key(name, n)))


def next_version(store: ObjectStore, name: str) -> int:
    """Return the number of the version that follows the newest one of ``name``."""
    return max((*list_versions(store, name), *written_versions(store, name)), default=0) + 1


def push_lock(push: str) -> str:
    """Return the key of the lock that the push of this id holds."""
    return f"{PUSHES}/{push}.lock"


class Journal:
    """The journal as one collection or push reads it, each entry once."""

    def __init__(
        self, store: ObjectStore, known: KnownEntries | None = None, *, changes_nothing: bool = False
    ) -> None:
        """Begin without any entry.

        Args:
            store: that has the journal.
            known: entries that are not read from the store, as a collection's must be.
            changes_nothing: whether locks are looked at alone: a push that cannot be seen from here runs then.
        """
        self._store = store
        self._known = known
        self._changes_nothing = changes_nothing
        self._entries: dict[int, _Entry] = {}
        self._ended = {""}

    def read(self) -> None:
        """Read what was added."""
        listed = [number for number in _listed(self._store) if number not in self._entries]
        for number, entry in zip(listed, side_by_side(self._store, self._entry, listed), strict=True):
            if entry is not None:
                self._entries[number] = entry
        for number in listed:
            self._follow(number)
        self._follow(max(self._entries, default=0))

    def refresh(self) -> None:
        """Read what was added, and look which pushes still run.

        Raises:
            DataError: an entry is damaged, and may be that of a push that runs.
        """
        self.read()
        self._ended |= {push for push in self._running() if not self._lives(push)}
        self.read()  # what those wrote before they ended
        for entry in self._current():
            if entry.damage is not None and self._is_pushed():
                raise entry.damage

    @property
    def needed(self) -> Needed:
        """Packs and structures that running pushes need."""
        needs = [entry.needed for entry in self._current() if entry.push not in self._ended]
        packs = frozenset[str]().union(*(each.packs for each in needs))
        return Needed(packs, frozenset[str]().union(*(each.structures for each in needs)))

    @property
    def versions(self) -> Mapping[str, Collection[int]]:
        """Versions that were written, by the model's name, of which some are gone by now."""
        found: dict[str, set[int]] = {}
        last = self._entries.get(self._last_sum(), _Entry())
        for entry in (last, *self._current()):
            for name, versions in entry.versions.items():
                found.setdefault(name, set()).update(versions)
        return found

    @property
    def moved(self) -> Mapping[tuple[str, str], Collection[str]]:
        """Packs that versions use since they were packed anew, by key and digest of the version, for a day at least.

        A store that had lost a node may still have a version as it was.
        """
        entries = (entry for _, entry in sorted(self._entries.items()))
        return {entry.moved: entry.needed.packs for entry in entries if entry.moved is not None}

    def sum_up(self, versions: Callable[[], Mapping[str, Collection[int]]]) -> None:
        """Add a sum if there are entries since the last one and no push runs, and remove what old sums have.

        Args:
            versions: gives the versions that are there, by the model's name.
        """
        self.refresh()
        newest = max(self._entries, default=0)
        if newest > self._last_sum() and not self._running():
            found = {name: sorted(numbers) for name, numbers in sorted(versions().items())}
            document = {"created": round(time.time()), "versions": found}
            with suppress(NoRoomError):  # the entries stay
                self._store.put_new(
                    _key(newest + 1), json.dumps(document).encode()
                )  # unless a push was faster
        old = [n for n, e in self._entries.items() if e.created and time.time() - e.created > KEPT_SECONDS]
        listed = set(_listed(self._store)) if old else set()
        for number in sorted(self._entries):
            if number < max(listed.intersection(old), default=0):
                self._store.delete(_key(number))

    def _current(self) -> Iterator[_Entry]:
        last = self._last_sum()
        return (entry for number, entry in self._entries.items() if number > last)

    def _last_sum(self) -> int:
        return max((n for n, entry in self._entries.items() if entry.created is not None), default=0)

    def _running(self) -> set[str]:
        return {entry.push for entry in self._current()} - self._ended

    def _follow(self, number: int) -> None:
        """Read the entries behind ``number``, and those before it, as far as there are any that are unknown."""
        for numbers in (range(number + 1, number + _MAX_HIDDEN), range(number - 1, 0, -1)):
            for at in numbers:
                if at in self._entries or (entry := self._entry(at)) is None:
                    break
                self._entries[at] = entry

    def _entry(self, number: int) -> _Entry | None:
        key = _key(number)
        try:
            data = None if self._known is None else self._known.find(key)
            if data is None:
                data = self._store.get(key)
            entry = _parsed(document_of(self._store, key, data, _REMEDY))
            if self._known is not None:
                self._known.add(key, data)
            return entry
        except NotFoundError:
            return None
        except DataError as error:
            return _Entry(damage=error)
        except (BadRequestError, ValueError, TypeError, LookupError, AttributeError) as error:
            return _Entry(damage=DataError(f"{self._store.url}/{key} is damaged: {error}; {_REMEDY}"))

    def _lives(self, push: str) -> bool:
        return self._store.exists(push_lock(push)) and self._is_held(push_lock(push))

    def _is_held(self, lock: str) -> bool:
        if self._changes_nothing:
            return self._store.may_be_locked(lock)
        try:
            with self._store.lock(lock):
                return False
        except ConflictError:
            return True

    def _is_pushed(self) -> bool:
        """Return whether any push runs that is listed."""
        return any(self._is_held(key) for key in self._store.list_keys(PUSHES) if key.endswith(".lock"))


def _listed(store: ObjectStore) -> list[int]:
    stems = (key.removeprefix(f"{JOURNAL}/").removesuffix(".json") for key in store.list_keys(JOURNAL))
    return [int(stem) for stem in stems if _NUMBER.fullmatch(stem)]


def _name_key(name: str) -> str:
    return f"repository/names/{check_name(name, 'name')}.json"


def _key(number: int) -> str:
    return f"{JOURNAL}/{number:08}.json"


def _parsed(document: Mapping[str, Any]) -> _Entry:
    if "versions" in document:
        found = {name: _numbers(name, numbers) for name, numbers in document["versions"].items()}
        return _Entry(versions=found, created=float(document["created"]))
    if "moved" in document:
        moved = str(document["moved"]), str(document["digest"])
        return _Entry(moved=moved, needed=Needed.from_json(document))
    push = str(document["push"])
    if _PUSH.fullmatch(push) is None:
        raise ValueError(f"{push:.40} is no push")
    if "version" in document:
        return _Entry(push, versions={document["name"]: _numbers(document["name"], [document["version"]])})
    return _Entry(push, Needed.from_json(document))


def _numbers(name: object, numbers: Iterable[object]) -> frozenset[int]:
    name = check_name(name, "name")
    return frozenset(check_int(number, 1, 10**8, name) for number in numbers)


def _ids(value: object) -> frozenset[str]:
    ids = value if isinstance(value, list) else []
    return frozenset(text for text in ids if isinstance(text, str) and PACK_PATTERN.fullmatch(text))
