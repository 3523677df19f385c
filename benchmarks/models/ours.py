"""Hapi's way of keeping a model, with and without memory that is used again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from benchmarks.models.content import Tensors
from benchmarks.models.settings import HTTP, LOCAL
from benchmarks.models.shapes import ModelShape
from benchmarks.models.sites import Keeper, Site
from hapi.models.tensors import tensor_bytes
from hapi.repository.entries import SourceTensor
from hapi.repository.loading.load import load
from hapi.repository.loading.pool import LoadingPool
from hapi.repository.loading.readers import RangeSource
from hapi.repository.manifest import ModelManifest, structure_of_document
from hapi.repository.opening import open_model
from hapi.repository.packs.place import pack_path
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.structure import ModelStructure
from hapi.store.base import ReadPart
from hapi.store.http.ranges import HttpRanges
from hapi.store.open import open_store
from hapi.wire import messages
from hapi.wire.transport.http import HttpTransport


class HapiKeeper(Keeper):
    """A model in a store of Hapi's: in a folder, in an object store, or behind a server."""

    def __init__(self, site: Site, pool: bool) -> None:
        """``pool``: whether memory is used again by later loads (DStore-OnDemand is without)."""
        self._store = open_store(site.url if site.place not in (LOCAL, HTTP) else site.folder)
        self._served = _Server(site) if site.url and site.place == HTTP else None
        self._pool = LoadingPool(on=pool)

    def store(self, shape: ModelShape, name: str, tensors: Tensors) -> None:
        """Push the model as tensors."""
        layers = [
            SourceLayer(
                layer.name, tuple(SourceTensor.of(tensor, tensors[tensor]) for tensor, _ in layer.tensors)
            )
            for layer in shape.layers
        ]
        push_tensors(self._store, name, layers)

    def load(self, name: str, into: Tensors) -> Tensors:
        """Load the tensors into memory of the pool."""
        source: RangeSource
        if self._served is not None:
            source, manifest = self._served.ranges, self._served.manifest(name)
        else:
            source, manifest = self._store, open_model(self._store, name).manifest
        entries = [entry for entry in manifest.tensors.values() if entry.name in into]
        return {entry.name: tensor for entry, tensor in load(source, entries, pool=self._pool)}

    def stages(self, name: str, into: Tensors) -> dict[str, float]:
        """Take memory whose pages are there, read the tensors into it, and check them, one after the other."""
        found: dict[str, float] = {}

        @contextmanager
        def timed(stage: str) -> Iterator[None]:
            began = time.perf_counter()
            yield
            found[stage] = time.perf_counter() - began

        with timed("manifest"):
            manifest = open_model(self._store, name).manifest
            entries = [entry for entry in manifest.tensors.values() if entry.name in into]
        with timed("memory"):
            memory = [self._pool.take(entry.nbytes) for entry in entries]
            for block in memory:
                block[::4096] = 0
        with timed("read"):
            parts = [ReadPart(e.pack, e.start, tensor_bytes(m)) for e, m in zip(entries, memory, strict=True)]
            self._store.read_many(parts)
        with timed("check"):
            for part in parts:
                xxhash.xxh3_64_hexdigest(part.out)
        return found


class _Server:
    """A server that has models, as a client uses it that keeps structures by their digest."""

    def __init__(self, site: Site) -> None:
        self._transport = HttpTransport(site.url, token=site.token)
        self.ranges = HttpRanges(self._transport, pack_path)
        self._structures: dict[str, ModelStructure] = {}

    def manifest(self, name: str) -> ModelManifest:
        """Return the latest version's manifest."""
        document = self._transport.call("GET", f"{messages.MODELS_PATH}/{name}")
        digest = structure_of_document(document)
        if digest not in self._structures:
            found = self._transport.call("GET", f"{messages.STRUCTURES_PATH}/{digest}")
            self._structures[digest] = ModelStructure.from_json(found)
        return ModelManifest.from_json(document, self._structures[digest])
