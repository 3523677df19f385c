"""Collection of what no model needs: packs and structures (``hapi gc``).

    read      -- packs that running pushes and all versions need
    condemn   -- the others are named in the store, where pushes look
    look      -- pushes and versions once more: what somebody needs by now is spared
    remove    -- the others go; then nothing is condemned any more
    repack    -- packs that are mostly dead are written anew (:mod:`hapi.repository.packs.repacking`), and go likewise

One collection runs at a time. What a kill leaves condemned costs pushes of the same content its bytes once more, until
the next collection. On a full disk everything but the packing takes no room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hapi.errors import DataError, NoRoomError, NotFoundError
from hapi.repository.known.shared_heads import forget_heads
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.packs.journal import PUSHES, Journal, Needed
from hapi.repository.packs.place import PACKS, REPOSITORY, is_pack, pack_id, pack_key
from hapi.repository.packs.pushes import COLLECTION, CONDEMNED, condemn, remove_dead_locks
from hapi.repository.packs.structure_key import STRUCTURES, structure_of_key
from hapi.repository.versions import (
    MODELS,
    NAME_LOCK,
    document_checksum,
    list_versions,
    model_names,
    read_document,
    version_key,
)
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.store.locking.locks import Lease
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.repository.packs.repacking import Rewrite

_TOGETHER = 64
"""Versions whose descriptions are in memory at a time: one of 1,000 tensors takes half a megabyte."""


def collect_packs(
    store: ObjectStore, *, dry_run: bool = False, note: Callable[[str], None] = lambda line: None
) -> tuple[ObjectInfo, ...]:
    """Remove the packs and structures that no version of a model and no running push needs.

    Packs that are mostly dead are packed anew, and removed too.

    Args:
        store: the store.
        dry_run: change nothing.
        note: told what is packed anew, in a line.

    Returns:
        The objects that went, or would go.

    Raises:
        DataError: a version cannot be read, so that it is unknown what it needs; nothing is removed.
        ConflictError: another collection is running.
    """
    for folder in () if dry_run else (REPOSITORY, MODELS):
        store.clean_temporary(folder, alone=False)  # pushes write there
    if not (any(map(store.list_keys, (PACKS, PUSHES, STRUCTURES, REPOSITORY))) or store.exists(CONDEMNED)):
        return ()
    journal = Journal(store, changes_nothing=dry_run)
    if dry_run:
        going = _garbage(store, journal)
        rewrites = _mostly_dead(store, journal, going)
        _tell(rewrites, "would be packed anew in", note)
        return (*going.values(), *(rewrite.old for rewrite in rewrites))
    with store.lock(COLLECTION) as lease:
        remove_dead_locks(store, PUSHES, ".lock")
        remove_dead_locks(store, REPOSITORY, NAME_LOCK)
        gone = _remove_garbage(store, journal, lease) + _packed_anew(store, journal, lease, note)
        lease.check()
        journal.sum_up(lambda: _existing(store, journal))
        if not store.list_keys(PACKS):
            forget_heads(store)
        return gone


def _remove_garbage(store: ObjectStore, journal: Journal, lease: Lease) -> tuple[ObjectInfo, ...]:
    going = _garbage(store, journal)
    if going:
        packs = frozenset(pack_id(key) for key in going if is_pack(key))
        others = (structure_of_key(key) for key in going if not is_pack(key))
        condemn(store, Needed(packs, frozenset(others)))
        now = _garbage(store, journal)
        going = {key: info for key, info in going.items() if key in now}
    for key in going:
        lease.check()
        store.delete(key)
    if store.exists(CONDEMNED):
        lease.check()
        store.delete(CONDEMNED)
    return tuple(going.values())


def _mostly_dead(store: ObjectStore, journal: Journal, going: Collection[str]) -> list[Rewrite]:
    """The packs to be packed anew, but those that are ``going`` or that running pushes need."""
    packs = [info for info in store.list(PACKS) if is_pack(info.key) and info.key not in going]
    if not packs:
        return []
    from hapi.repository.packs.repacking import find_rewrites  # brings torch

    journal.refresh()
    documents = (document for _, _, document in _documents(store, journal))
    return find_rewrites(store, packs, documents, journal.needed.packs)


def _packed_anew(
    store: ObjectStore, journal: Journal, lease: Lease, note: Callable[[str], None]
) -> tuple[ObjectInfo, ...]:
    """Pack anew what is mostly dead, as far as there is room; return the objects that went for it."""
    rewrites = sorted(_mostly_dead(store, journal, ()), key=lambda rewrite: rewrite.size)
    left, count, gone = rewrites, len(rewrites), dict[str, ObjectInfo]()
    while left:
        fits = _exchanged(store, journal, left[:count], lease)
        gone |= {info.key: info for info in _remove_garbage(store, journal, lease)}
        if fits:
            left = left[count:]  # a damaged one is left for a repair
        elif count == 1:
            break  # nor is there room for larger ones
        else:
            left, count = [rewrite for rewrite in left if rewrite.old.key not in gone], 1
    _tell([rewrite for rewrite in rewrites if rewrite.old.key in gone], "were packed anew in", note)
    _tell(left, "stay until there is room to pack them anew in", note)
    new = {pack_key(rewrite.id) for rewrite in rewrites}
    return tuple(info for key, info in gone.items() if key not in new)


def _exchanged(store: ObjectStore, journal: Journal, rewrites: Sequence[Rewrite], lease: Lease) -> bool:
    """Write new packs and let versions use them; return whether there was room."""
    from hapi.repository.packs.repacking import move_versions, write_pack  # brings torch

    written, fits = [], True
    try:
        for rewrite in rewrites:
            lease.check()
            if write_pack(store, rewrite):
                written.append(rewrite)
    except NoRoomError:
        fits = False
    try:
        journal.refresh()
        move_versions(store, _documents(store, journal), written, lease)
    except NoRoomError:
        fits = False
    return fits


def _tell(rewrites: Sequence[Rewrite], fate: str, note: Callable[[str], None]) -> None:
    if rewrites:
        before, after = sum(r.old.size for r in rewrites), sum(r.size for r in rewrites)
        note(
            f"{len(rewrites)} packs of {format_bytes(before)}, more than half of it dead, {fate} {format_bytes(after)}"
        )


def _needed_by_models(store: ObjectStore, journal: Journal) -> Needed:
    """Contents that all versions of all models need; :class:`DataError` if one cannot be read."""
    packs: set[str] = set()
    structures: set[str] = set()
    moved = journal.moved
    for _, key, document in _documents(store, journal):
        where = f"{store.url}/{key}"
        structures.add(_text(document, "structure", where))
        packs |= {*_texts(document, "packs", where), *moved.get((key, str(document.get("digest"))), ())}
    return Needed(frozenset(packs), frozenset(structures))


def _documents(store: ObjectStore, journal: Journal) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, key and document of each version of all models; :class:`DataError` for one that cannot be read.

    Few of them are in memory at a time.
    """
    versions = _versions(store, journal)
    for start in range(0, len(versions), _TOGETHER):
        some = versions[start : start + _TOGETHER]
        keys = [version_key(name, version) for name, version in some]
        found = side_by_side(store, lambda key: _document(store, key), keys)
        for (name, _), key, document in zip(some, keys, found, strict=True):
            if document is not None:
                yield name, key, document


def _document(store: ObjectStore, key: str) -> Mapping[str, Any] | None:
    """The document of a version; None for one that was removed since it was listed, or written."""
    try:
        document = read_document(store, key)
    except NotFoundError:
        return None
    if document.get("checksum") != document_checksum(document):
        raise _unreadable(f"{store.url}/{key}")
    return document


def _versions(store: ObjectStore, journal: Journal) -> list[tuple[str, int]]:
    """Versions that the store lists or the journal knows, with some that are gone."""
    known = journal.versions
    names = sorted({*model_names(store), *known})
    listed = side_by_side(store, lambda name: list_versions(store, name), names)
    return [
        (name, version)
        for name, versions in zip(names, listed, strict=True)
        for version in sorted({*versions, *known.get(name, ())})
    ]


def _existing(store: ObjectStore, journal: Journal) -> Mapping[str, list[int]]:
    versions = _versions(store, journal)
    exist = side_by_side(store, store.exists, [version_key(name, version) for name, version in versions])
    found: dict[str, list[int]] = {}
    for (name, version), exists in zip(versions, exist, strict=True):
        if exists:
            found.setdefault(name, []).append(version)
    return found


def _garbage(store: ObjectStore, journal: Journal) -> Mapping[str, ObjectInfo]:
    # Objects first, then pushes, then models: what ends in between is found one step later.
    listed = [*store.list(PACKS), *store.list(STRUCTURES)]
    journal.refresh()
    pushes = journal.needed
    models = _needed_by_models(store, journal)
    needed = {pack_key(pack) for pack in models.packs | pushes.packs}
    structures = models.structures | pushes.structures
    return {
        info.key: info
        for info in listed
        if info.key not in needed and (is_pack(info.key) or structure_of_key(info.key) not in structures)
    }


def _text(document: Mapping[str, object], field: str, where: str) -> str:
    value = document.get(field)
    if not isinstance(value, str):
        raise _unreadable(where)
    return value


def _unreadable(where: str) -> DataError:
    return DataError(
        f"{where} does not say what it needs, so nothing can be removed: it is damaged, or a newer hapi wrote it; "
        "update this one, or remove that version with 'hapi rm' and push the model again"
    )


def _texts(document: Mapping[str, object], field: str, where: str) -> Iterable[str]:
    value = document.get(field)
    if not isinstance(value, list):
        return [_text(document, field, where)]
    return [_text({field: item}, field, where) for item in value]
