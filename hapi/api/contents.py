"""Contents of a store, by its address: listed and checked. Brings no torch, but for pushed models."""

from __future__ import annotations

from collections.abc import Callable

from hapi.data.listing import DatasetSummary
from hapi.data.listing import list_datasets as datasets_of
from hapi.data.manifest import manifest_key
from hapi.data.verify import verify_dataset
from hapi.errors import NotFoundError
from hapi.repository.versions import list_versions
from hapi.store.base import ObjectStore
from hapi.store.damage import Damage, Progress, VerifyReport
from hapi.store.open import open_store, split_model_address
from hapi.wire.references import NAME_PATTERN

__all__ = ("is_model", "list_datasets", "verify")


def verify(
    address: str,
    *,
    model: bool | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_damage: Callable[[Damage], None] = lambda damage: None,
    on_progress: Progress = lambda samples, size: None,
) -> VerifyReport:
    """Read a whole dataset or pushed model, and check every checksum, as ``hapi verify`` does.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> _ = hapi.pack("dots.npz", "store/dots")
    >>> report = hapi.verify("store/dots")
    >>> report.sound, report.samples
    (True, 6)

    Args:
        address: STORE/NAME.
        model: True for the model of this name, False for the dataset, None for the dataset if there is one.
        on_start: told the samples to come, or the bytes of a model.
        on_damage: told each finding; the report has them all.
        on_progress: told samples (of a model: tensors) and bytes since its last call.

    Raises:
        NotFoundError: there is neither a dataset nor a model of this name.
        StoreError: the store itself fails.
    """
    url, name = split_model_address(address)
    store = open_store(url)
    if is_model(store, name) if model is None else model:
        from hapi.repository.verify import verify_model  # brings torch

        return verify_model(
            store,
            name,
            on_start=lambda manifest: on_start(manifest.nbytes),
            on_damage=on_damage,
            on_progress=on_progress,
        )
    return verify_dataset(
        store,
        name,
        on_start=lambda manifest: on_start(manifest.count),
        on_damage=on_damage,
        on_progress=on_progress,
    )


def is_model(store: ObjectStore, name: str) -> bool:
    """Return whether ``name``, or NAME@REF, in ``store`` is a pushed model and not a dataset.

    Raises:
        NotFoundError: it is neither, or there is no such store.
    """
    name, at, _ = name.partition("@")
    # A store's listing may lack what was just written (Swift's, when a node is down), which is found by its key.
    is_name = NAME_PATTERN.fullmatch(name) is not None and ".." not in name
    is_dataset = name in store.list_names("datasets") or (is_name and store.exists(manifest_key(name)))
    found = name in store.list_names("models") or (is_name and bool(list_versions(store, name)))
    if not is_dataset and not found:
        store.ping()
        raise NotFoundError(
            f"there is no dataset or model {name!r} in {store.url}; 'hapi ls {store.url}' lists what is there"
        )
    return found and (bool(at) or not is_dataset)


def list_datasets(store: str) -> list[DatasetSummary]:
    """Return a store's datasets, sorted by name, with unfinished and damaged ones; ``store`` is a URL or
    folder.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> _ = hapi.pack("dots.npz", "store/dots")
    >>> [(found.name, found.state, found.count) for found in hapi.list_datasets("store")]
    [('dots', 'whole', 6)]

    Raises:
        NotFoundError: there is no such store.
    """
    return datasets_of(open_store(store))
