"""Datasets that are replaced while they are read: by the same version, by another one, and kept for a while."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.values import BEGINNING, Values

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.manifest import load_manifest
from hapi.data.mount import mount
from hapi.data.reading.reader import chunk_cache
from hapi.data.replaced import find_manifest, list_replaced
from hapi.data.verify import verify_dataset
from hapi.errors import ConflictError, DataError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

SMALL = PackOptions(shard_bytes=1024)
DAY = 24 * 3600.0


A, B, C = (Values(seed) for seed in range(3))
ALL = np.arange(200)


def test_the_same_again_is_read_on(store: ObjectStore) -> None:
    old = pack(A, store, "d", SMALL)
    reader = find_dataset(store, "d", cache=chunk_cache(store, 0))
    assert np.array_equal(reader.read(ALL).data.reshape(-1, 16), A.values)
    new = pack(A, store, "d", SMALL, replace=True)
    assert new.version == old.version and new.pack != old.pack
    assert not list_replaced(store, "d") and not any(old.pack in info.key for info in store.list())
    for ids in (ALL, ALL[::-7]):
        assert np.array_equal(reader.read(ids).data.reshape(-1, 16), A.values[ids])
    assert reader.manifest.pack == new.pack and verify_dataset(store, "d").sound


def test_repair_heals_what_is_open(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    reader = find_dataset(store, "d")
    key = reader.shard_key(1)
    store.put(key, store.get(key)[:100])
    for _ in range(2):  # chunks that were found damaged are known as such
        with pytest.raises(DataError, match="pack the dataset again"):
            reader.read(ALL)
        assert reader.read([0]).ids.tolist() == [0]
    pack(A, store, "d", SMALL, replace=True)
    assert np.array_equal(reader.read(ALL).data.reshape(-1, 16), A.values)
    grid = reader.reader._grid
    assert not reader.reader.chunked or not grid.refused.any()


def test_a_mount_and_its_sample_cache_go_on(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    pack(A, store, "d", SMALL)
    with mount(
        f"{store.url}/d", cache_bytes=0, read_ahead_bytes=64, sample_cache=tmp_path / "cache"
    ) as mounted:
        for epoch in range(3):
            order = mounted.sequence(1, epoch)
            for low in range(0, 200, 20):
                batch = mounted.next_batch(20)
                assert np.array_equal(batch.data.reshape(-1, 16), A.values[order[low : low + 20]])
                if epoch != 1 and low == 100:
                    pack(A, store, "d", SMALL, replace=True)


def test_another_version_leaves_the_old_one_readable(
    store: ObjectStore, now: Callable[[float], None]
) -> None:
    old = pack(A, store, "d", SMALL)
    running = find_dataset(store, "d", cache=chunk_cache(store, 0))
    new = pack(B, store, "d", SMALL, replace=True)
    (known,) = list_replaced(store, "d")
    assert known.manifest == old and known.until == BEGINNING + DAY and old.version in str(known)
    assert np.array_equal(running.read(ALL).data.reshape(-1, 16), A.values)
    assert np.array_equal(find_dataset(store, "d", old.version).read(ALL).data.reshape(-1, 16), A.values)
    assert find_dataset(store, "d").version == new.version == find_manifest(store, "d").version
    assert verify_dataset(store, "d").sound
    summary = describe(store, "d")
    assert summary is not None and summary.version == new.version
    with pytest.raises(ConflictError, match="keep-old"):
        find_dataset(store, "d", "0" * 32)
    with pytest.raises(ConflictError):
        find_dataset(store, "d", "../../x")
    now(DAY - 1)
    third = pack(C, store, "d", SMALL, replace=True)
    assert {k.manifest.version for k in list_replaced(store, "d")} == {old.version, new.version}
    assert np.array_equal(running.read(ALL).data.reshape(-1, 16), A.values)
    now(DAY + 1)
    pack(C, store, "d", SMALL, replace=True)
    assert [k.manifest.version for k in list_replaced(store, "d")] == [new.version]
    with pytest.raises(ConflictError, match="begin again with the version of now") as told:
        running.read(ALL)
    assert third.version in str(told.value) and str(told.value).isprintable()
    assert np.array_equal(find_dataset(store, "d", new.version).read(ALL).data.reshape(-1, 16), B.values)
    assert verify_dataset(store, "d").sound


def test_back_and_forth(store: ObjectStore) -> None:
    first = pack(A, store, "d", SMALL)
    running = find_dataset(store, "d", cache=chunk_cache(store, 0))
    second = pack(B, store, "d", SMALL, replace=True)
    again = pack(A, store, "d", SMALL, replace=True)
    assert again.version == first.version
    assert [known.manifest.version for known in list_replaced(store, "d")] == [second.version]
    assert np.array_equal(running.read(ALL).data.reshape(-1, 16), A.values)
    assert running.manifest.pack == again.pack
    pack(B, store, "d", SMALL, replace=True)
    assert np.array_equal(running.read(ALL).data.reshape(-1, 16), A.values)
    assert [known.manifest.pack for known in list_replaced(store, "d")] == [again.pack]
    assert verify_dataset(store, "d").sound


def test_nothing_is_kept_when_so_asked(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    pack(B, store, "d", SMALL, replace=True)
    pack(C, store, "d", SMALL, replace=True, keep_old=0)
    assert list_replaced(store, "d") == [] and len(store.list("datasets/d")) == 6


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[" * 100_000, b'{"until": 1e400, "manifest": {}}', b'{"until": true, "manifest": null}'],
)
def test_a_damaged_record_harms_nobody(store: ObjectStore, damage: bytes) -> None:
    old = pack(A, store, "d", SMALL)
    pack(B, store, "d", SMALL, replace=True)
    key = f"datasets/d/replaced/{old.version}.json"
    store.put(key, damage)
    assert find_dataset(store, "d").read([3]).ids.tolist() == [3]
    with pytest.raises(ConflictError):
        find_dataset(store, "d", old.version)
    assert not verify_dataset(store, "d").sound  # what it kept belongs to nothing now
    pack(C, store, "d", SMALL, replace=True)
    assert verify_dataset(store, "d").sound and not store.exists(key)


def test_a_record_of_another_version_is_not_believed(store: ObjectStore) -> None:
    old = pack(A, store, "d", SMALL)
    new = pack(B, store, "d", SMALL, replace=True)
    key = f"datasets/d/replaced/{old.version}.json"
    document = json.loads(store.get(key))
    document["manifest"] = json.loads(new.to_bytes())
    store.put(key, json.dumps(document).encode())
    with pytest.raises(ConflictError):
        find_dataset(store, "d", old.version)


def test_replaced_between_manifest_and_index(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(A, store, "d", SMALL)
    size = store.size

    def late(key: str) -> int:
        monkeypatch.undo()
        pack(A, store, "d", SMALL, replace=True)
        return size(key)

    monkeypatch.setattr(store, "size", late)
    assert np.array_equal(find_dataset(store, "d").read(ALL).data.reshape(-1, 16), A.values)


def test_the_count_of_the_manifest_is_held_against_the_index(store: ObjectStore) -> None:
    manifest = pack(A, store, "d", SMALL)
    wrong = json.loads(manifest.to_bytes())
    for count in (199, 201, 1 << 40):
        other = replace(manifest, count=count)
        store.put("datasets/d/manifest.json", other.to_bytes())
        assert load_manifest(store, "d").count == count != wrong["count"]
        with pytest.raises(DataError, match=f"200 samples, the manifest says {count}"):
            find_dataset(store, "d")
        assert not verify_dataset(store, "d").sound
