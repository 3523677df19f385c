"""The open datasets of a server: each version once, opened under a lock of its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress

from hapi.data.dataset import Dataset, find_dataset
from hapi.data.manifest import Manifest, manifest_key
from hapi.data.reading.chunk_cache import ChunkCache
from hapi.data.replaced import find_manifest
from hapi.errors import NotFoundError
from hapi.models.keyed_locks import KeyedLocks
from hapi.store.base import ObjectStore
from hapi.wire.references import DatasetReference

INDEX_BYTES = 4 << 30
"""Bound of the indexes that are kept open; the one asked for last is kept whatever its size."""

_SEEN = 100
"""Manifests that are remembered."""


class OpenDatasets:
    """Datasets of one store by name and version. Thread-safe.

    A dataset that hangs in a slow store delays only the requests for it. The least recently used ones are
    dropped when all indexes together are above the bound; requests that read from one keep it until they are
    done.
    """

    def __init__(self, store: ObjectStore, chunks: ChunkCache, index_bytes: int = INDEX_BYTES) -> None:
        """Open datasets of ``store``; all of them share the cache ``chunks``."""
        self._store, self._chunks, self._max_bytes = store, chunks, index_bytes
        self._guard = threading.Lock()
        self._opening = KeyedLocks()
        self._open: OrderedDict[DatasetReference, Dataset] = OrderedDict()
        self._seen: OrderedDict[str, tuple[bytes, Manifest]] = OrderedDict()
        """Latest known manifest by name."""

    def get(self, reference: DatasetReference) -> Dataset:
        """Return the dataset in that very version; errors are those of :func:`find_dataset`."""
        found = self._known(reference)
        if found is not None:
            return found
        with self._opening.holding(reference):
            found = self._known(reference)
            if found is None:
                found = find_dataset(self._store, reference.name, reference.version, self._chunks)
                self._keep(reference, found)
            return found

    def current(self, name: str) -> Dataset:
        """Return the dataset ``name`` in its present version.

        If it is open only the manifest is read; it is parsed when its bytes have changed.
        """
        manifest = self._manifest(name)
        dataset = self.get(DatasetReference(name=name, version=manifest.version))
        dataset.refresh(manifest)
        return dataset

    def _manifest(self, name: str) -> Manifest:
        with self._guard:
            seen = self._seen.get(name)
        if seen is not None:
            with suppress(NotFoundError):  # which find_manifest tells better
                if self._store.get(manifest_key(name)) == seen[0]:
                    return seen[1]
        manifest = find_manifest(self._store, name)
        with self._guard:
            self._seen[name] = manifest.to_bytes(), manifest
            self._seen.move_to_end(name)
            while len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        return manifest

    def _known(self, reference: DatasetReference) -> Dataset | None:
        with self._guard:
            found = self._open.get(reference)
            if found is not None:
                self._open.move_to_end(reference)
            return found

    def _keep(self, reference: DatasetReference, dataset: Dataset) -> None:
        with self._guard:
            self._open[reference] = dataset
            total = sum(other.manifest.index_size for other in self._open.values())
            while total > self._max_bytes and len(self._open) > 1:
                _, oldest = self._open.popitem(last=False)
                total -= oldest.manifest.index_size
