"""The datasets that a server has open: each once, one that hangs holds up nobody else, and all of them bounded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hapi.data.reading.reader import chunk_cache
from hapi.errors import ConflictError, DataError, NotFoundError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.server.datasets import OpenDatasets
from hapi.store.local import LocalStore
from hapi.wire.references import DatasetReference


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for name in "abc":
        make(store, name)
    return store


def make(store: LocalStore, name: str, limit: int = 20) -> DatasetReference:
    source = open_source("sklearn:digits")
    made = pack(source, store, name, PackOptions(limit=limit, shard_bytes=2000), replace=True)
    return DatasetReference(name=name, version=made.version)


def opened(store: LocalStore, **options: Any) -> OpenDatasets:
    return OpenDatasets(store, chunk_cache(store, 0), **options)


def test_a_description_reads_the_manifest_only(store: LocalStore) -> None:
    datasets = opened(store)
    first = datasets.current("a")
    with (
        mock.patch("hapi.data.dataset.read_index") as index,
        mock.patch.object(store, "get", wraps=store.get) as get,
        mock.patch("hapi.server.datasets.find_manifest") as parsed,
    ):
        assert datasets.current("a") is first is datasets.get(first.reference)
    assert not index.called and not parsed.called
    assert [call.args for call in get.call_args_list] == [("datasets/a/manifest.json",)]
    with pytest.raises(NotFoundError):
        datasets.current("x")


def test_what_was_replaced(store: LocalStore) -> None:
    datasets = opened(store)
    first = datasets.current("a")
    packed = first.manifest.pack
    make(store, "a")
    assert datasets.current("a") is first and first.manifest.pack != packed
    newer = make(store, "a", limit=25)
    second = datasets.current("a")
    assert second.reference == newer and second.count == 25 and second is not first
    assert datasets.get(first.reference) is first and len(first.read(np.arange(20))) == 20
    assert len(opened(store).get(first.reference).read([3])) == 1
    store.delete("datasets/a/manifest.json")
    with pytest.raises(NotFoundError, match="'a'"):
        datasets.current("a")
    with pytest.raises(ConflictError):
        datasets.get(DatasetReference(name="b", version="0" * 32))


def test_a_failed_opening_is_tried_again(store: LocalStore) -> None:
    datasets = opened(store)
    (index,) = store.root.glob("datasets/a/*/index.safetensors")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(DataError, match="pack the dataset again"):
        datasets.current("a")
    assert datasets.current("b").count == 20
    make(store, "a")
    assert datasets.current("a").count == 20


def test_one_that_hangs_holds_up_nobody_else(store: LocalStore) -> None:
    datasets = opened(store)
    entered, leave, got = threading.Event(), threading.Event(), []

    def size(key: str) -> int:
        if key.startswith("datasets/a/"):
            entered.set()
            assert leave.wait(240)
        return LocalStore.size(store, key)

    with mock.patch.object(store, "size", size):
        waiting = [threading.Thread(target=lambda: got.append(datasets.current("a"))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        assert entered.wait(240)
        assert datasets.current("b").name == "b" and datasets.current("c").name == "c"
        assert not got
        leave.set()
        for thread in waiting:
            thread.join()
    assert len(got) == 3 and len({id(dataset) for dataset in got}) == 1


def test_indexes_are_bounded_together(store: LocalStore) -> None:
    size = opened(store).current("a").manifest.index_size
    datasets = opened(store, index_bytes=2 * size + 100)
    a, b = datasets.current("a"), datasets.current("b")
    assert datasets.current("a") is a
    c = datasets.current("c")
    assert datasets.current("a") is a and datasets.current("c") is c
    assert datasets.current("b") is not b and len(b.read([1])) == 1
    tiny = opened(store, index_bytes=0)
    assert tiny.current("a") is tiny.current("a")
