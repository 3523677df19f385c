"""Versions of a dataset that another one has replaced: readable for a while, so that running jobs end with them.

    replaced/VERSION.json   the manifest that was replaced, and until when its shards are kept

It is written before the new manifest, and removed before what it keeps: whatever dies in between leaves too much in
the store, never a version that looks whole. The next packing or indexing of the name removes what is over time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from hapi.data.manifest import Manifest, dataset_prefix, load_manifest
from hapi.errors import BadRequestError, ConflictError, DataError, NotFoundError
from hapi.store.base import ObjectStore
from hapi.wire.documents import parse_document, strict_fields
from hapi.wire.references import DIGEST_PATTERN

KEEP_OLD_SECONDS = 24 * 3600.0
"""Time for which a replaced version stays readable, unless ``--keep-old`` says otherwise."""
MAX_KEEP_SECONDS = 10 * 365 * 86400.0
_FOLDER = "replaced"


@dataclass(frozen=True)
class Replaced:
    """A version that was replaced, and the time (Unix, by the clock of its replacer) until which it is kept."""

    manifest: Manifest
    until: float

    def __str__(self) -> str:
        end = datetime.fromtimestamp(self.until, UTC)
        return f"version {self.manifest.version} until {end:%Y-%m-%d %H:%M} UTC"

    def to_bytes(self) -> bytes:
        """Return the record as JSON text."""
        document = {"until": self.until, "manifest": self.manifest.to_json()}
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str, where: str) -> Self:
        """Parse a record of dataset ``name``; :class:`DataError` naming ``where`` when it is not sound."""
        try:
            d = strict_fields(
                parse_document(data), dict.fromkeys(("until", "manifest"), True), "replaced version"
            )
            until: Any = d["until"]
            if isinstance(until, bool) or not isinstance(until, int | float) or not 0 <= until < 1e11:
                raise BadRequestError("until: expected a time")
            manifest = Manifest.from_json(d["manifest"], name, where)
        except (ValueError, BadRequestError) as error:
            raise DataError(f"{where} is damaged ({str(error)[:200]}); it can be removed") from error
        return cls(manifest, float(until))


def replaced_prefix(name: str) -> str:
    """Return the key prefix of the records of dataset ``name``."""
    return f"{dataset_prefix(name)}/{_FOLDER}"


def record(store: ObjectStore, new: Manifest, keep_seconds: float) -> None:
    """Record, right before the manifest ``new`` is written, that the replaced version is kept for
    ``keep_seconds``.

    Nothing is recorded when there is no sound version to keep, or when it is the same version: readers then
    go on with the new shards.
    """
    try:
        old = load_manifest(store, new.name)
    except (NotFoundError, DataError):
        return
    if new.version != old.version:
        keep(store, old, keep_seconds)


def keep(store: ObjectStore, old: Manifest, keep_seconds: float) -> None:
    """Record, right before the manifest ``old`` goes, that its version is kept for ``keep_seconds``; 0: not at all."""
    if keep_seconds > 0:
        known = Replaced(old, time.time() + keep_seconds)
        store.put(f"{replaced_prefix(old.name)}/{old.version}.json", known.to_bytes())


def list_replaced(store: ObjectStore, name: str) -> list[Replaced]:
    """Return the records of dataset ``name``; damaged ones are left out."""
    keys = (info.key for info in store.list(replaced_prefix(name)))
    return [found for key in keys if (found := _load(store, name, key)) is not None]


def kept(
    store: ObjectStore,
    name: str,
    current: Manifest | None,
    keys: Iterable[str],
    keep_seconds: float = math.inf,
) -> set[str]:
    """Return those of the objects ``keys`` that belong to replaced versions whose time is not over.

    Args:
        store: where the dataset lies.
        name: its name there.
        current: its manifest; a record of the same version is not needed any more. None: it was removed.
        keys: all objects below the dataset's prefix.
        keep_seconds: as ``--keep-old`` says; 0 ends the time of all.
    """
    if keep_seconds <= 0:
        return set()
    keys = list(keys)
    prefix, found = f"{replaced_prefix(name)}/", set[str]()
    for key in [key for key in keys if key.startswith(prefix)]:
        known = _load(store, name, key)
        if known is None or known.until <= time.time():
            continue
        if current is not None and known.manifest.version == current.version:
            continue
        found.add(key)
        pack = f"{dataset_prefix(name)}/{known.manifest.pack}/"
        found |= {other for other in keys if other.startswith(pack)}
    return found


def find_manifest(store: ObjectStore, name: str, version: str | None = None) -> Manifest:
    """Return the manifest of dataset ``name`` in ``version``, which may be a replaced or removed one; None: the
    current one.

    Raises:
        NotFoundError: there is no such dataset.
        ConflictError: that version is kept no longer.
    """
    known = None
    try:
        manifest = load_manifest(store, name)
        if version is None or manifest.version == version:
            return manifest
        known = _known(store, name, version)
    except NotFoundError:
        known = None if version is None else _known(store, name, version)
        if known is None:
            raise
    if known is not None:
        return known.manifest
    raise ConflictError(
        f"dataset {name!r} has version {manifest.version} now, and version {version} is not kept (any longer): "
        "it was replaced; begin again with the version of now. 'hapi pack --replace --keep-old' says how long "
        "a replaced version stays readable"
    )


def _known(store: ObjectStore, name: str, version: str) -> Replaced | None:
    """The record of one version; None when it is not kept."""
    key = f"{replaced_prefix(name)}/{version}.json"
    known = _load(store, name, key) if DIGEST_PATTERN.fullmatch(version) else None
    return known if known is not None and known.manifest.version == version else None


def _load(store: ObjectStore, name: str, key: str) -> Replaced | None:
    try:
        return Replaced.from_bytes(store.get(key), name, f"{store.url}/{key}")
    except (NotFoundError, DataError):
        return None
