"""``hapi rm`` and ``hapi gc``: datasets and models that are taken away, and objects that belong to nothing.

Every step is taken by the holder of the name's lock, so nothing is removed that somebody writes just now. A dataset
or model ends with its manifest, which is removed first. What a kill leaves after that belongs to nothing, and the next
``hapi gc`` or ``hapi rm`` removes it. A dataset's shards stay for jobs that run with it, as those of a replaced version
do (:mod:`hapi.data.replaced`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from hapi.data.listing import LOCK_NAME, PACKING_NAME
from hapi.data.manifest import Manifest, dataset_prefix, load_manifest, manifest_key
from hapi.data.replaced import KEEP_OLD_SECONDS, keep, kept
from hapi.errors import BadRequestError, ConflictError, DataError, NotFoundError
from hapi.ingest.transaction import Packing
from hapi.store.base import ObjectInfo, ObjectStore, is_key
from hapi.store.locking.locks import is_lock_object
from hapi.units import format_duration
from hapi.wire.documents import parse_document
from hapi.wire.references import NAME_PATTERN, check_name

Kind = Literal["dataset", "model"]
FOLDERS: dict[str, Kind] = {"datasets": "dataset", "models": "model"}
PUSH_LOCK, MODEL_FILE = "push.lock", "model.json"
UNFINISHED_SECONDS = 24 * 3600.0
"""Age from which an unfinished packing that nobody works on belongs to nothing, unless ``--older-than`` says so."""


@dataclass(frozen=True)
class Removal:
    """Objects of one name that are removed, or would be."""

    kind: Kind
    name: str
    objects: tuple[ObjectInfo, ...] = ()
    """In the order in which they go."""
    staying: int = 0
    """Bytes that stay for running jobs."""
    notes: tuple[str, ...] = field(default=())
    """Objects that stay for another reason, a line each."""

    @property
    def size(self) -> int:
        """Bytes of the objects."""
        return sum(info.size for info in self.objects)


def remove(
    store: ObjectStore,
    name: str,
    *,
    model: bool = False,
    keep_old: float = KEEP_OLD_SECONDS,
    force_lock: bool = False,
    dry_run: bool = False,
) -> Removal:
    """Remove the dataset or model ``name``, also an unfinished or damaged one.

    Args:
        store: where it lies.
        name: its name there.
        model: the pushed model of this name, not the dataset.
        keep_old: seconds for which a dataset's shards stay for jobs that run with it; then :func:`collect` takes
            them away. Models go at once.
        force_lock: take the lock of another writer that is known to be dead.
        dry_run: change nothing.

    Returns:
        The objects that went or would go.

    Raises:
        NotFoundError: there is no such dataset or model.
        ConflictError: it is being written.
    """
    kind: Kind = "model" if model else "dataset"
    found = _removal(store, kind, name, keep_old)
    if not found.objects and not found.staying:
        raise NotFoundError(
            f"there is no {kind} {name!r} in {store.url}; 'hapi ls {store.url}' lists what is there"
        )
    if dry_run:
        return found
    with store.lock(_lock(kind, name), force=force_lock) as lease:
        manifest = _manifest(store, name) if kind == "dataset" else None
        if manifest is not None:
            keep(store, manifest, keep_old)
        found = _removal(store, kind, name, keep_old)
        lease.check()  # after the listing: nothing in it can be of one that takes the lock from now on
        _delete(store, found)
    return found


def collect(
    store: ObjectStore, *, older_than: float = UNFINISHED_SECONDS, dry_run: bool = False
) -> Iterator[Removal]:
    """Remove the objects of a store that belong to no dataset or model; yield those of each name.

    These are replaced and removed versions whose time is over, the rests of killed commands, and packings that were
    begun and not finished.

    Args:
        store: the store.
        older_than: seconds since its beginning after which an unfinished packing is given up.
        dry_run: change nothing.

    Raises:
        NotFoundError: there is no such store.
    """
    store.ping()
    for folder, kind in FOLDERS.items():
        for name in store.list_names(folder):
            if NAME_PATTERN.fullmatch(name):
                yield _collected(store, kind, name, older_than, dry_run)


def _collected(store: ObjectStore, kind: Kind, name: str, older_than: float, dry_run: bool) -> Removal:
    if dry_run:
        return _garbage(store, kind, name, older_than)
    try:
        with store.lock(_lock(kind, name)) as lease:
            found = _garbage(store, kind, name, older_than)
            lease.check()
            _delete(store, found)
            return found
    except ConflictError as error:
        return Removal(kind, name, notes=(str(error),))


def _delete(store: ObjectStore, found: Removal) -> None:
    for info in found.objects:
        store.delete(info.key)
    store.clean_temporary(_prefix(found.kind, found.name))


def _prefix(kind: Kind, name: str) -> str:
    return dataset_prefix(name) if kind == "dataset" else f"models/{check_name(name, 'model')}"


def _lock(kind: Kind, name: str) -> str:
    return f"{_prefix(kind, name)}/{LOCK_NAME if kind == 'dataset' else PUSH_LOCK}"


def _objects(store: ObjectStore, kind: Kind, name: str) -> list[ObjectInfo]:
    """All objects of a name but those of its lock, which only its holders remove."""
    lock = _lock(kind, name)
    found = store.list(_prefix(kind, name))
    return [info for info in found if is_key(info.key) and not is_lock_object(info.key, lock)]


def _manifest(store: ObjectStore, name: str) -> Manifest | None:
    """The manifest of a dataset; None without a sound one."""
    try:
        return load_manifest(store, name)
    except (NotFoundError, DataError):
        return None


def _removal(store: ObjectStore, kind: Kind, name: str, keep_old: float) -> Removal:
    """All objects of a name but those that stay for running jobs; the manifest goes first."""
    objects = _objects(store, kind, name)
    staying: set[str] = set()
    if kind == "dataset":
        staying = kept(store, name, None, [info.key for info in objects], keep_old)
        manifest = _manifest(store, name)
        if manifest is not None and keep_old > 0:
            staying |= _pack_of(manifest, objects)
    last = (manifest_key(name),) if kind == "dataset" else (f"{_prefix(kind, name)}/{MODEL_FILE}",)
    going = _ordered(kind, name, (info for info in objects if info.key not in staying), last)
    return Removal(kind, name, going, sum(info.size for info in objects if info.key in staying))


def _pack_of(manifest: Manifest, objects: Sequence[ObjectInfo]) -> set[str]:
    """The shards and the index that a manifest names, without the parts that an unfinished packing has."""
    folder = f"{dataset_prefix(manifest.name)}/{manifest.pack}/"
    keys = {info.key for info in objects if info.key.startswith(folder)}
    return {key for key in keys if not key.endswith(".part.safetensors")}


def _ordered(
    kind: Kind, name: str, objects: Iterable[ObjectInfo], first: Sequence[str] = ()
) -> tuple[ObjectInfo, ...]:
    """Manifests, then records of what is replaced, then the rest: whatever is cut short leaves too much."""
    early = (*first, f"{_prefix(kind, name)}/{PACKING_NAME}")
    records = f"{_prefix(kind, name)}/replaced/"

    def rank(info: ObjectInfo) -> tuple[int, str]:
        known = early.index(info.key) if info.key in early else len(early)
        return known + (known == len(early) and not info.key.startswith(records)), info.key

    return tuple(sorted(objects, key=rank))


def _garbage(store: ObjectStore, kind: Kind, name: str, older_than: float) -> Removal:
    """The objects of a name that belong to nothing."""
    objects = _objects(store, kind, name)
    try:
        known, notes = (_dataset_parts if kind == "dataset" else _model_parts)(
            store, name, objects, older_than
        )
    except (DataError, BadRequestError) as error:
        return Removal(kind, name, notes=(f"left alone, since it is damaged: {error}",))
    going = _ordered(kind, name, (info for info in objects if info.key not in known))
    return Removal(kind, name, going, notes=tuple(notes))


def _dataset_parts(
    store: ObjectStore, name: str, objects: Sequence[ObjectInfo], older_than: float
) -> tuple[set[str], list[str]]:
    """The keys that belong to a dataset, its kept versions and its unfinished packing; and notes."""
    try:
        manifest: Manifest | None = load_manifest(store, name)
    except NotFoundError:
        manifest = None
    keys = [info.key for info in objects]
    known = kept(store, name, manifest, keys)
    if manifest is not None:
        known |= {manifest_key(name)} | _pack_of(manifest, objects)
    packing = Packing.load(store, name)
    if packing is None or (manifest is not None and manifest.pack == packing.pack):
        return known, []
    age = time.time() - datetime.fromisoformat(packing.created).timestamp()
    if age >= older_than:
        return known, []
    folder = f"{dataset_prefix(name)}/{packing.pack}/"
    known |= {key for key in keys if key.startswith(folder)} | {f"{dataset_prefix(name)}/{PACKING_NAME}"}
    return known, [f"unfinished, begun {format_duration(max(0.0, age))} ago: kept for 'hapi pack' to go on"]


def _model_parts(
    store: ObjectStore, name: str, objects: Sequence[ObjectInfo], older_than: float
) -> tuple[set[str], list[str]]:
    """The keys that belong to a pushed model; a push that was killed left nothing of use."""
    key = f"{_prefix('model', name)}/{MODEL_FILE}"
    try:
        document = parse_document(store.get(key))
    except NotFoundError:
        return set(), []
    except ValueError as error:
        raise DataError(f"{key} is not JSON: {error}") from None
    push = check_name(document.get("push") if isinstance(document, dict) else None, "push")
    folder = f"{_prefix('model', name)}/{push}/"
    return {key} | {info.key for info in objects if info.key.startswith(folder)}, []
