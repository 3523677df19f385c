"""Opening pushed models: a reference, its version's manifest, and the structure, which is read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hapi.errors import BadRequestError, ConflictError, DataError, HapiError, NotFoundError
from hapi.models.keyed_locks import KeyedLocks
from hapi.repository.known.documents import KnownDocuments
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.known.structures import StructureCache
from hapi.repository.manifest import ModelManifest, structure_of_document
from hapi.repository.packs.lost import pack_sizes, problem_of_packs
from hapi.repository.packs.structure_key import plain_structure_key, structure_key
from hapi.repository.stored import StoredModel
from hapi.repository.structure import ModelStructure
from hapi.repository.versions import (
    MODELS,
    ModelAddress,
    list_tags,
    list_versions,
    parse_reference,
    read_document,
    resolve,
    version_key,
)
from hapi.store.base import ObjectStore
from hapi.wire.references import check_digest

_KEPT = 64
"""Structures that are kept parsed. They are named by their content, so any store's will do."""

_structures: OrderedDict[str, ModelStructure] = OrderedDict()
_lock, _reading = threading.Lock(), KeyedLocks()


@dataclass(frozen=True)
class ModelSummary:
    """One line about a pushed model; ``problem`` says why it cannot be used."""

    name: str
    architecture: str | None = None
    digest: str | None = None
    bytes: int | None = None
    layers: int | None = None
    version: int | None = None
    """The latest version, which the other fields are about."""
    tags: tuple[str, ...] = ()
    """Tags of any version."""
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {**asdict(self), "tags": list(self.tags)}


def open_model(store: ObjectStore, reference: str, digest: str | None = None) -> StoredModel:
    """Open a pushed model.

    Args:
        store: where it lies.
        reference: NAME for its latest version, or NAME@VERSION, NAME@TAG, NAME@DIGEST.
        digest: the digest that it must have; None for any.

    Raises:
        NotFoundError: there is no such model or version; the message names those that are there.
        ConflictError: the version has another digest.
        DataError: its description is damaged.
    """
    address = parse_reference(reference)
    manifest = read_manifest(store, address.name, resolve(store, address))
    if digest is not None and manifest.digest != check_digest(digest, "digest"):
        raise ConflictError(
            f"model {reference!r} has digest {manifest.digest} here, not {digest}; it was pushed again"
        )
    return StoredModel(store, manifest)


def read_manifest(
    store: ObjectStore,
    name: str,
    version: int,
    known: KnownDocuments | None = None,
    *,
    fresh: bool = False,
) -> ModelManifest:
    """Return the manifest of a version.

    Args:
        store: that has it.
        name: of the model.
        version: its number.
        known: documents that are not read again.
        fresh: read the structure from the store, whatever this machine knows, as for who relies on its being there.

    Raises:
        NotFoundError: there is no such version.
        DataError: it or its structure is damaged or missing.
    """
    key = version_key(name, version)
    where = f"{store.url}/{key}"
    document = read_document(store, key) if known is None else known.read(key)
    try:
        structure = (read_structure if fresh else structure_of_digest)(store, structure_of_document(document))
        manifest = ModelManifest.from_json(document, structure)
    except BadRequestError as error:
        raise DataError(f"{where} is damaged or from another version of hapi: {error}") from error
    if (manifest.name, manifest.version) != (name, version):
        raise DataError(f"{where} describes {manifest.reference!r}; push {name!r} again")
    return manifest


def structure_of_digest(store: ObjectStore, digest: str) -> ModelStructure:
    """Return a structure of the store by its digest; :class:`DataError` if it is missing or damaged.

    One that this process has, or this machine has read from a remote store, is not read again.
    """
    with _lock:
        found = _structures.get(digest)
        if found is not None:
            _structures.move_to_end(digest)
            return found
    with _reading.holding(digest):  # of many threads that list models of one structure one reads it
        with _lock:
            found = _structures.get(digest)
        if found is None:
            cache = StructureCache.of(store)
            read = partial(read_structure, store, digest)
            found = read() if cache is None else cache.find(digest, read)
    with _lock:
        _structures[digest] = found
        while len(_structures) > _KEPT:
            _structures.popitem(last=False)
    return found


def read_structure(store: ObjectStore, digest: str) -> ModelStructure:
    """Read a structure from the store; see :func:`structure_of_digest`, which reads it once."""
    key = structure_key(check_digest(digest, "structure"))
    where = f"{store.url}/{key}"
    with suppress(NotFoundError):
        return ModelStructure.from_stored(store.get(key), digest, where)
    try:
        return ModelStructure.from_bytes(store.get(plain_structure_key(digest)), digest, where)
    except NotFoundError:
        raise DataError(f"{where} is missing; push the model again") from None


def has_structure(store: ObjectStore, digest: str) -> bool:
    """Return whether the store has a structure of this digest."""
    return store.exists(structure_key(digest)) or store.exists(plain_structure_key(digest))


def list_models(store: ObjectStore) -> list[ModelSummary]:
    """Return a line about every model in the store, damaged ones included."""
    names = store.list_names(MODELS)
    sizes = pack_sizes(store) if names else {}
    with KnownDocuments(store) as known:
        return side_by_side(store, lambda name: _summary(store, name, sizes, known), names)


def _summary(store: ObjectStore, name: str, sizes: Mapping[str, int], known: KnownDocuments) -> ModelSummary:
    try:
        if not list_versions(store, name):
            return ModelSummary(name, problem="it has no version: push it again")
        tags = tuple(sorted(list_tags(store, name)))
        found = read_manifest(store, name, resolve(store, ModelAddress(name, None)), known)
    except HapiError as error:
        return ModelSummary(name, problem=str(error))
    architecture = None if found.spec is None else found.spec.architecture
    problem = problem_of_packs(store, ((entry.pack, entry.stop) for entry in found.tensors.values()), sizes)
    return ModelSummary(
        name, architecture, found.digest, found.nbytes, len(found.layers), found.version, tags, problem
    )
