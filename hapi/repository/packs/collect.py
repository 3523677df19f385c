"""Collection of what no model needs: packs and structures (``hapi gc``).

    read      -- packs that running pushes and all versions need
    condemn   -- the others are named in the store, where pushes look
    look      -- pushes and versions once more: what somebody needs by now is spared
    remove    -- the others go; then nothing is condemned any more

One collection runs at a time. What a kill leaves condemned costs pushes of the same content its bytes once more, until
the next collection. Brings no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from hapi.errors import DataError, NotFoundError
from hapi.repository.packs.place import PACKS, REPOSITORY, is_pack, pack_id, pack_key
from hapi.repository.packs.pushes import (
    COLLECTION,
    CONDEMNED,
    PUSHES,
    Needed,
    needed_by_pushes,
    remove_dead_locks,
)
from hapi.repository.structure_key import STRUCTURES, structure_key
from hapi.repository.versions import (
    MODELS,
    NAMES,
    document_checksum,
    list_versions,
    model_names,
    read_document,
    version_key,
)
from hapi.store.base import ObjectInfo, ObjectStore


def collect_packs(store: ObjectStore, *, dry_run: bool = False) -> tuple[ObjectInfo, ...]:
    """Remove the packs and structures that no version of a model and no running push needs.

    Args:
        store: the store.
        dry_run: change nothing.

    Returns:
        The objects that went, or would go.

    Raises:
        DataError: a version cannot be read, so that it is unknown what it needs; nothing is removed.
        ConflictError: another collection is running.
    """
    for folder in () if dry_run else (REPOSITORY, MODELS):
        store.clean_temporary(
            folder, alone=False
        )  # pushes write there; first, as the lock needs room on the disk
    if dry_run or not (
        any(map(store.list_keys, (PACKS, PUSHES, STRUCTURES, NAMES))) or store.exists(CONDEMNED)
    ):
        return tuple(_garbage(store, clean=False).values())
    with store.lock(COLLECTION) as lease:
        for folder in (NAMES, PUSHES):
            remove_dead_locks(store, folder)
        going = _garbage(store, clean=True)
        if going:
            packs = sorted(pack_id(key) for key in going if is_pack(key))
            structures = [key.rpartition("/")[2].removesuffix(".json") for key in going if not is_pack(key)]
            store.put(CONDEMNED, json.dumps({"packs": packs, "structures": structures}).encode())
            now = _garbage(store, clean=True)
            going = {key: info for key, info in going.items() if key in now}
        for key in going:
            lease.check()
            store.delete(key)
        if store.exists(CONDEMNED):
            lease.check()
            store.delete(CONDEMNED)
    return tuple(going.values())


def needed_by_models(store: ObjectStore) -> Needed:
    """Return what all versions of all models need; :class:`DataError` if one cannot be read."""
    packs: set[str] = set()
    structures: set[str] = set()
    for name in model_names(store):
        for version in list_versions(store, name):
            key = version_key(name, version)
            try:
                document = read_document(store, key)
            except NotFoundError:
                continue  # removed since the listing
            where = f"{store.url}/{key}"
            if document.get("checksum") != document_checksum(document):
                raise _unreadable(where)
            structures.add(_text(document, "structure", where))
            packs |= set(_texts(document, "packs", where))
    return Needed(frozenset(packs), frozenset(structures))


def _garbage(store: ObjectStore, *, clean: bool) -> Mapping[str, ObjectInfo]:
    # Objects first, then pushes, then models: what ends in between is found one step later.
    listed = [*store.list(PACKS), *store.list(STRUCTURES)]
    pushes = needed_by_pushes(store, clean=clean)
    models = needed_by_models(store)
    needed = {pack_key(pack) for pack in models.packs | pushes.packs}
    needed |= {structure_key(digest) for digest in models.structures | pushes.structures}
    return {info.key: info for info in listed if info.key not in needed}


def _text(document: Mapping[str, object], field: str, where: str) -> str:
    value = document.get(field)
    if not isinstance(value, str):
        raise _unreadable(where)
    return value


def _unreadable(where: str) -> DataError:
    return DataError(
        f"{where} does not say what it needs, so nothing can be removed: it is damaged or from another version of "
        "hapi; remove that version with 'hapi rm' and push the model again"
    )


def _texts(document: Mapping[str, object], field: str, where: str) -> Iterable[str]:
    value = document.get(field)
    if not isinstance(value, list):
        return [_text(document, field, where)]
    return [_text({field: item}, field, where) for item in value]
