"""Packing that is interrupted, killed, or in the way of another: the dataset is whole or not there, and goes on."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.byte_source import SMALL, ByteSource
from support.stores import DyingStore, Killed, flip

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.verify import verify_dataset
from hapi.errors import (
    ConflictError,
    DataError,
    NotFoundError,
)
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import LeaseLostError, LockOwner
from hapi.store.open import open_store


def test_a_damaged_part_of_an_unfinished_packing_is_packed_again(store: ObjectStore) -> None:
    wanted = pack(ByteSource(500), open_store(f"memory://{uuid.uuid4().hex}"), "d", SMALL).version
    for position in (-1, -100, -64 * 16 - 1, -64 * 32 + 3):
        with pytest.raises(KeyboardInterrupt):
            pack(ByteSource(500, fail_at=300), store, "d", SMALL, replace=True, restart=True)
        (part,) = [i.key for i in store.list("datasets/d") if i.key.endswith("00002.part.safetensors")]
        data = store.get(part)
        flip(store, part, position % len(data))
        done: list[tuple[int, int, int]] = []
        manifest = pack(
            ByteSource(500),
            store,
            "d",
            SMALL,
            replace=True,
            on_start=lambda *numbers, into=done: into.append(numbers),
        )
        assert done == [(500, 128, 2048)] and manifest.version == wanted
        assert verify_dataset(store, "d").sound


def test_replace(store: ObjectStore) -> None:
    old = pack(ByteSource(200), store, "d", SMALL)
    reader = find_dataset(store, "d")
    with pytest.raises(ConflictError, match="--replace"):
        pack(ByteSource(200, seed=1), store, "d", SMALL)
    new = pack(ByteSource(200, seed=1), store, "d", SMALL, replace=True, keep_old=0)
    assert new.version != old.version and old.pack not in {
        i.key.split("/")[2] for i in store.list("datasets/d")
    }
    with pytest.raises(ConflictError, match="replaced"):
        reader.read([0])
    assert verify_dataset(store, "d").sound
    again = pack(ByteSource(200, seed=1), store, "again", SMALL)
    assert again.version == new.version


def test_interrupted_packing_goes_on(store: ObjectStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(ByteSource(500, fail_at=300), store, "d", SMALL)
    with pytest.raises(NotFoundError, match="not finished"):
        find_dataset(store, "d")
    summary = describe(store, "d")
    assert summary is not None and summary.state == "incomplete"
    with pytest.raises(ConflictError, match="--restart"):
        pack(ByteSource(500, seed=5), store, "d", SMALL)
    with pytest.raises(ConflictError, match="--restart"):
        pack(ByteSource(500), store, "d", PackOptions(shard_bytes=2048))
    resumed: list[tuple[int, int, int]] = []
    source = ByteSource(500)
    manifest = pack(source, store, "d", SMALL, on_start=lambda *numbers: resumed.append(numbers))
    assert resumed == [(500, 256, 4096)]
    fresh = pack(ByteSource(500), open_store(f"memory://{uuid.uuid4().hex}"), "d", SMALL)
    assert manifest.version == fresh.version and verify_dataset(store, "d").sound
    assert np.array_equal(find_dataset(store, "d").read(range(500)).data.reshape(500, 16), source.values)


def test_interrupted_replacement_leaves_the_old_one_readable(store: ObjectStore) -> None:
    old = pack(ByteSource(100), store, "d", SMALL)
    with pytest.raises(KeyboardInterrupt):
        pack(ByteSource(500, fail_at=300), store, "d", SMALL, replace=True)
    assert find_dataset(store, "d").version == old.version and verify_dataset(store, "d").sound
    assert find_dataset(store, "d").read([5]).labels.tolist() == [1]
    summary = describe(store, "d")
    assert summary is not None and summary.state == "whole" and summary.packing
    new = pack(ByteSource(80), store, "d", SMALL, replace=True, restart=True, keep_old=0)
    assert len({i.key.split("/")[2] for i in store.list("datasets/d")} - {"manifest.json"}) == 1
    assert find_dataset(store, "d").version == new.version


@pytest.mark.slow_except("False-0")
@pytest.mark.parametrize(("replacing", "keep"), [(False, 0), (True, 0), (True, 600)])
def test_death_at_every_single_change(replacing: bool, keep: float, tmp_path: Path) -> None:
    """After a death at any step the dataset is not there, or the old one is, or the new one, always whole.

    Where the old one is kept, it can be read by its version throughout.
    """
    wanted = pack(ByteSource(200), open_store(f"memory://{uuid.uuid4().hex}"), "d", SMALL).version
    deaths = 0
    while True:
        store = open_store(f"memory://{uuid.uuid4().hex}")
        old = pack(ByteSource(70, seed=9), store, "d", SMALL).version if replacing else None
        try:
            dying: Any = DyingStore(store, deaths)
            pack(ByteSource(200), dying, "d", SMALL, replace=replacing, keep_old=keep)
            break
        except Killed:
            deaths += 1
        summary = describe(store, "d")
        if summary is not None and summary.state == "whole":
            assert summary.version in (old, wanted)
            assert verify_dataset(store, "d").sound
            assert find_dataset(store, "d").read([3]).ids.tolist() == [3]
            if keep:
                assert find_dataset(store, "d", old).read([69]).ids.tolist() == [69]
        made = pack(ByteSource(200), store, "d", SMALL, replace=replacing, keep_old=keep)
        assert made.version == wanted
        assert verify_dataset(store, "d").sound
        assert len(store.list("datasets/d")) == (10 if keep else 6)
        if keep:
            assert find_dataset(store, "d", old).read([69]).ids.tolist() == [69]
    assert deaths > 10


def test_second_writer_is_told(store: ObjectStore) -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waiting(ByteSource):
        def sample(self, number: int) -> bytes:
            inside.set()
            leave.wait(240)
            return super().sample(number)

    first = threading.Thread(target=pack, args=(Waiting(50), store, "d", SMALL))
    first.start()
    assert inside.wait(240)
    try:
        with pytest.raises(ConflictError, match="being written by process"):
            pack(ByteSource(50), store, "d", SMALL)
        pack(ByteSource(50), store, "other", SMALL)
    finally:
        leave.set()
        first.join()
    assert find_dataset(store, "d").count == 50


def test_a_packing_that_has_lost_its_lock_removes_nothing_of_the_others(store: ObjectStore) -> None:
    """Another one takes the lock, and is done, at each of the steps of this one."""
    for step in ("shard-00000.bin", "shard-00000.part.safetensors", "index.safetensors"):
        other = ByteSource(30, seed=1)
        put = store.put

        def meanwhile(key: str, data: Any, step: str = step, put: Any = put) -> None:
            put(key, data)
            if key.endswith(step):
                store.put = put  # type: ignore[method-assign]
                key = next(i.key for i in store.list("datasets/d") if i.key.endswith("pack.lock"))
                owner = LockOwner.from_bytes(store.get(key).partition(b"\n")[0])
                store.put(f"{key}.after-{owner.id}", LockOwner.new().to_bytes())
                store.put("datasets/d/new/shard-00000.bin", b"the other's")

        store.put = meanwhile  # type: ignore[method-assign]
        with pytest.raises(LeaseLostError, match="taken over by process"):
            pack(other, store, "d", SMALL)
        assert store.get("datasets/d/new/shard-00000.bin") == b"the other's"
        assert not store.exists("datasets/d/manifest.json")
        for info in store.list():
            store.delete(info.key)


def test_a_manifest_that_another_wrote_meanwhile_stays(store: ObjectStore) -> None:
    """The last line of defence: this one was paused after its last look at the lock."""
    pack(ByteSource(30), store, "d", SMALL)
    replaced = store.put_over

    def late(key: str, data: bytes, mark: str | None) -> None:
        store.put(key, b"the other's")
        replaced(key, data, mark)

    store.put_over = late  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="written by another process meanwhile"):
        pack(ByteSource(30, seed=1), store, "d", SMALL, replace=True)
    assert store.get("datasets/d/manifest.json") == b"the other's"


@pytest.mark.parametrize("change", ["gone", "cut"])
def test_a_shard_that_goes_before_the_manifest_is_written(store: ObjectStore, change: str) -> None:
    put = store.put

    def meanwhile(key: str, data: Any) -> None:
        put(key, data)
        if key.endswith("index.safetensors"):
            shard = next(i.key for i in store.list("datasets/d") if i.key.endswith("shard-00001.bin"))
            store.delete(shard) if change == "gone" else put(shard, b"1")

    store.put = meanwhile  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"shard-00001.bin (is gone|has 1 bytes instead of)"):
        pack(ByteSource(200), store, "d", SMALL)
    assert not store.exists("datasets/d/manifest.json")
    store.put = put  # type: ignore[method-assign]
    pack(ByteSource(200), store, "d", SMALL)
    assert verify_dataset(store, "d").sound
