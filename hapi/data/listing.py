"""Datasets in a store, whole or still being packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hapi.data.manifest import InPlace, Manifest
from hapi.errors import DataError, NotFoundError, StoreError, StoreUnavailableError, UsageError
from hapi.store.base import ObjectStore
from hapi.store.open import open_store, split_address
from hapi.wire.labels import LabelKind
from hapi.wire.references import NAME_PATTERN, TransformSpec

PACKING_NAME = "packing.json"
"""Written when a packing begins and removed when it is done; see ``pack.py``."""

LOCK_NAME = "pack.lock"

STORE_FOLDERS = ("datasets", "models", "repository")
"""Folders of a store that Hapi writes."""


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """A line of ``hapi ls``.

    ``state`` is "whole", "incomplete" (an unfinished packing or indexing) or "damaged". Damaged is also a
    dataset that cannot be read; ``problem`` has the reason.
    """

    name: str
    state: str
    version: str | None = None
    count: int = 0
    classes: tuple[str, ...] = field(default=(), repr=False)
    total_bytes: int = 0
    kind: str | None = None
    transform: TransformSpec | None = None
    source: str | None = None
    created: str | None = None
    shards: int = 0
    in_place: InPlace | None = None
    """Location of the shards that were indexed and not packed."""
    label_kind: LabelKind | None = None
    skipped: int = 0
    """Bad samples that were left out."""
    packing: bool = False
    """A packing of this name was begun and is not done (for a whole dataset: its replacement)."""
    problem: str | None = None


def is_store(folder: Path) -> bool:
    """Return whether a folder has files of a store."""
    signs = (
        f"datasets/*/{PACKING_NAME}",
        "datasets/*/*/index.safetensors",
        "models/*/versions",
        "repository/packs",
    )
    try:
        return any(next(folder.glob(sign), None) is not None for sign in signs)
    except OSError:
        return False


def lies_in_store(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is ``folder`` or would be among the files that Hapi keeps in it, were it a store."""
    inside = path.relative_to(folder).parts
    return not inside or inside[0] in STORE_FOLDERS


def check_store(url: str, then: str = "") -> None:
    """Raise :class:`UsageError` if ``url``, given as ``--store``, is the address of a dataset in a local store.

    Args:
        url: a store's URL, or STORE/NAME by mistake.
        then: flag that names the dataset, for the message.
    """
    if "://" in url and not url.startswith("file://"):
        return
    place = open_store(url)
    if any(place.list_names(folder) for folder in ("datasets", "models")):
        return
    try:
        parent, name = split_address(url)
    except UsageError:
        return
    if name in open_store(parent).list_names("datasets"):
        raise UsageError(
            f"--store {url}: {name} is a data set of the store {parent}; give --store {parent}"
            + (f" {then} {name}" if then else "")
        )


def list_datasets(store: ObjectStore) -> list[DatasetSummary]:
    """All datasets of a store by name. :class:`NotFoundError` when there is no such store."""
    store.ping()
    found = [describe(store, name) for name in store.list_names("datasets") if NAME_PATTERN.fullmatch(name)]
    return [summary for summary in found if summary is not None]


def describe(store: ObjectStore, name: str) -> DatasetSummary | None:
    """Describe one dataset; None when there is neither a manifest nor a packing of it.

    A dataset that cannot be read is a damaged one, so that the others are listed all the same.
    """
    prefix = f"datasets/{name}"
    packing = False
    try:
        packing = store.exists(f"{prefix}/{PACKING_NAME}")
        manifest = Manifest.from_bytes(store.get(f"{prefix}/manifest.json"), name, f"{store.url}/{prefix}")
    except NotFoundError:
        return DatasetSummary(name=name, state="incomplete", packing=True) if packing else None
    except StoreUnavailableError:
        raise
    except (DataError, StoreError) as error:
        return DatasetSummary(name=name, state="damaged", packing=packing, problem=str(error))
    return DatasetSummary(
        name=name,
        state="whole",
        version=manifest.version,
        count=manifest.count,
        classes=manifest.classes,
        total_bytes=manifest.total_bytes,
        kind=manifest.layout.kind,
        transform=manifest.transform,
        source=manifest.source,
        created=manifest.created,
        shards=manifest.shards,
        in_place=manifest.in_place,
        skipped=manifest.skipped,
        label_kind=manifest.label_kind,
        packing=packing,
    )
