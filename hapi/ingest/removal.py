"""``hapi rm`` and ``hapi gc``: datasets and models that are taken away, and objects that belong to nothing.

A dataset's objects are removed by the holder of the name's lock, so nothing is removed that somebody writes just now.
It ends with its manifest, which is removed first. What a kill leaves after that belongs to nothing, and the next
``hapi gc`` or ``hapi rm`` removes it. A dataset's shards stay for jobs that run with it, as those of a replaced version
do (:mod:`hapi.data.replaced`). A model ends with its tags and versions, which nobody else writes again. The packs of
its tensors stay for other models, until ``hapi gc`` finds that none needs them
(:mod:`hapi.repository.packs.collect`).
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
from hapi.repository.packs.collect import collect_packs
from hapi.repository.versions import (
    ModelAddress,
    holding,
    list_tags,
    list_versions,
    model_prefix,
    parse_reference,
    resolve,
    tag_keys,
    version_key,
)
from hapi.store.base import ObjectInfo, ObjectStore, is_key
from hapi.store.locking.locks import is_lock_object
from hapi.units import format_duration
from hapi.wire.references import NAME_PATTERN

Kind = Literal["dataset", "model", "repository"]
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
    is_damaged: bool = False
    """Whether something cannot be read, so that it is unknown what belongs to nothing."""

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
    if model:
        return remove_model(store, name, dry_run=dry_run)
    found = _removal(store, name, keep_old)
    if not found.objects and not found.staying:
        raise _unknown(store, "dataset", name)
    if dry_run:
        return found
    with store.lock(_lock(name), force=force_lock) as lease:
        manifest = _manifest(store, name)
        if manifest is not None:
            keep(store, manifest, keep_old)
        found = _removal(store, name, keep_old)
        lease.check()  # after the listing: nothing in it can be of one that takes the lock from now on
        _delete(store, found)
    return found


def _unknown(store: ObjectStore, kind: Kind, name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no {kind} {name!r} in {store.url}; 'hapi ls {store.url}' lists what is there"
    )


def remove_model(store: ObjectStore, reference: str, *, dry_run: bool = False) -> Removal:
    """Remove a pushed model with its tags, or one version of it.

    Args:
        store: where it lies.
        reference: NAME for all its versions; NAME@VERSION, NAME@TAG or NAME@DIGEST for one.
        dry_run: change nothing.

    Raises:
        NotFoundError: there is no such model or version.
        ConflictError: the version has a tag, or somebody else has been changing tags for ten seconds.
    """
    address = parse_reference(reference)
    if dry_run:
        return _model_removal(store, reference, address)
    with holding(store, address.name):
        found = _model_removal(store, reference, address)
        for info in found.objects:
            store.delete(info.key)
    return found


def _model_removal(store: ObjectStore, reference: str, address: ModelAddress) -> Removal:
    if address.wanted is not None:
        version = resolve(store, address)
        held = [tag.name for tag in list_tags(store, address.name).values() if tag.version == version]
        if held:
            raise ConflictError(
                f"version {version} of model {address.name!r} is tagged {', '.join(held)}; move the tag first"
                " (hapi tag), or remove the whole model"
            )
        key = version_key(address.name, version)
        return Removal("model", reference, (ObjectInfo(key, store.size(key)),))
    objects = store.list(model_prefix(address.name))
    known = {version_key(address.name, version) for version in list_versions(store, address.name)}
    listed = {info.key for info in objects}
    hidden = (known | tag_keys(store, address.name)) - listed  # a listing may be behind
    objects += [ObjectInfo(key, store.size(key)) for key in hidden if store.exists(key)]
    if not objects:
        raise _unknown(store, "model", address.name)
    tags = f"{model_prefix(address.name)}/tags/"
    return Removal(
        "model", reference, tuple(sorted(objects, key=lambda info: (tags not in info.key, info.key)))
    )


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
    for name in store.list_names("datasets"):
        if NAME_PATTERN.fullmatch(name):
            yield _collected(store, name, older_than, dry_run)
    packs = _collected_packs(store, dry_run)
    if packs.objects or packs.notes:
        yield packs


def _collected(store: ObjectStore, name: str, older_than: float, dry_run: bool) -> Removal:
    if dry_run:
        return _garbage(store, name, older_than)
    try:
        with store.lock(_lock(name)) as lease:
            found = _garbage(store, name, older_than)
            lease.check()
            _delete(store, found)
            return found
    except ConflictError as error:
        return Removal("dataset", name, notes=(str(error),))


def _collected_packs(store: ObjectStore, dry_run: bool) -> Removal:
    notes: list[str] = []
    try:
        gone = collect_packs(store, dry_run=dry_run, note=notes.append)
        return Removal("repository", "tensors of models", gone, notes=tuple(notes))
    except (ConflictError, DataError) as error:
        damaged = isinstance(error, DataError)
        return Removal("repository", "tensors of models", notes=(*notes, str(error)), is_damaged=damaged)


def _delete(store: ObjectStore, found: Removal) -> None:
    for info in found.objects:
        store.delete(info.key)
    store.clean_temporary(dataset_prefix(found.name))


def _lock(name: str) -> str:
    return f"{dataset_prefix(name)}/{LOCK_NAME}"


def _objects(store: ObjectStore, name: str) -> list[ObjectInfo]:
    """All objects of a dataset but those of its lock, which only its holders remove."""
    lock = _lock(name)
    found = store.list(dataset_prefix(name))
    return [info for info in found if is_key(info.key) and not is_lock_object(info.key, lock)]


def _manifest(store: ObjectStore, name: str) -> Manifest | None:
    """The manifest of a dataset; None without a sound one."""
    try:
        return load_manifest(store, name)
    except (NotFoundError, DataError):
        return None


def _removal(store: ObjectStore, name: str, keep_old: float) -> Removal:
    """All objects of a dataset but those that stay for running jobs; the manifest goes first."""
    objects = _objects(store, name)
    staying = kept(store, name, None, [info.key for info in objects], keep_old)
    manifest = _manifest(store, name)
    if manifest is not None and keep_old > 0:
        staying |= _pack_of(manifest, objects)
    going = _ordered(name, (info for info in objects if info.key not in staying), (manifest_key(name),))
    return Removal("dataset", name, going, sum(info.size for info in objects if info.key in staying))


def _pack_of(manifest: Manifest, objects: Sequence[ObjectInfo]) -> set[str]:
    """The shards and the index that a manifest names, without the parts that an unfinished packing has."""
    folder = f"{dataset_prefix(manifest.name)}/{manifest.pack}/"
    keys = {info.key for info in objects if info.key.startswith(folder)}
    return {key for key in keys if not key.endswith(".part.safetensors")}


def _ordered(name: str, objects: Iterable[ObjectInfo], first: Sequence[str] = ()) -> tuple[ObjectInfo, ...]:
    """Manifests, then records of what is replaced, then the rest: whatever is cut short leaves too much."""
    early = (*first, f"{dataset_prefix(name)}/{PACKING_NAME}")
    records = f"{dataset_prefix(name)}/replaced/"

    def rank(info: ObjectInfo) -> tuple[int, str]:
        known = early.index(info.key) if info.key in early else len(early)
        return known + (known == len(early) and not info.key.startswith(records)), info.key

    return tuple(sorted(objects, key=rank))


def _garbage(store: ObjectStore, name: str, older_than: float) -> Removal:
    """The objects of a dataset that belong to nothing."""
    objects = _objects(store, name)
    try:
        known, notes = _dataset_parts(store, name, objects, older_than)
    except (DataError, BadRequestError) as error:
        return Removal("dataset", name, notes=(f"left alone, since it is damaged: {error}",), is_damaged=True)
    going = _ordered(name, (info for info in objects if info.key not in known))
    return Removal("dataset", name, going, notes=tuple(notes))


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
