"""Datasets and models that are removed, and what belongs to nothing: whole or not at all, also when killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.killed_storing import killed_storing
from support.stores import DyingStore, Killed
from support.values import Values

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.reading.reader import chunk_cache
from hapi.data.verify import verify_dataset
from hapi.errors import ConflictError, NotFoundError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.removal import collect, remove
from hapi.repository.packs.place import pack_key
from hapi.repository.packs.structure_key import structure_key
from hapi.repository.versions import compressed, document_checksum, version_key
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore

SMALL = PackOptions(shard_bytes=1024)
DAY = 24 * 3600.0
ALL = np.arange(200)


A, B = Values(0), Values(1)


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list()]


PACK, UNUSED = "a" * 32, "b" * 32


def put_model(store: ObjectStore, name: str, pack: str = PACK) -> None:
    """A pushed model as far as removal looks at it."""
    store.put(pack_key(pack), b"weights")
    store.put(structure_key(pack), b"structure")
    document = {"packs": [pack], "structure": pack}
    checked = {**document, "checksum": document_checksum(document)}
    store.put(version_key(name, 1), compressed(checked))


def test_removed_at_once(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    pack(B, store, "other", SMALL)
    put_model(store, "d")
    before = keys(store)
    would = remove(store, "d", keep_old=0, dry_run=True)
    assert keys(store) == before and len(would.objects) == 6 and would.staying == 0
    done = remove(store, "d", keep_old=0)
    assert [info.key for info in done.objects] == [info.key for info in would.objects]
    assert not store.list("datasets/d") and verify_dataset(store, "other").sound
    assert remove(store, "d", model=True).size > 0 and not store.list("models")
    assert sum(len(found.objects) for found in collect(store)) == 2 and not store.list("repository")
    for model in (False, True):
        with pytest.raises(NotFoundError, match=r"there is no (dataset|model) 'd' in .*hapi ls"):
            remove(store, "d", model=model)


def test_running_jobs_go_on(store: ObjectStore, now: Callable[[float], None]) -> None:
    version = pack(A, store, "d", SMALL).version
    reader = find_dataset(store, "d", cache=chunk_cache(store, 0))
    done = remove(store, "d")
    assert done.staying > A.values.nbytes and describe(store, "d") is None
    with pytest.raises(NotFoundError, match="there is no dataset 'd'"):
        find_dataset(store, "d")
    for readers in (reader, find_dataset(store, "d", version, chunk_cache(store, 0))):
        assert np.array_equal(readers.read(ALL).data.reshape(-1, 16), A.values)
    now(DAY - 1)
    assert not [found for found in collect(store) if found.objects]
    now(DAY + 1)
    (found,) = collect(store, dry_run=True)
    assert found.size == done.staying
    (found,) = collect(store)
    assert found.size == done.staying and not keys(store)
    with pytest.raises(NotFoundError):
        find_dataset(store, "d", version)


def test_a_name_is_free_at_once(store: ObjectStore) -> None:
    old = pack(A, store, "d", SMALL)
    reader = find_dataset(store, "d", cache=chunk_cache(store, 0))
    remove(store, "d")
    new = pack(B, store, "d", SMALL)
    assert np.array_equal(find_dataset(store, "d").read(ALL).data.reshape(-1, 16), B.values)
    assert np.array_equal(reader.read(ALL).data.reshape(-1, 16), A.values)
    assert new.version != old.version and verify_dataset(store, "d").sound


def test_what_belongs_to_something_stays(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    pack(B, store, "d", SMALL, replace=True)
    put_model(store, "m")
    before = keys(store)
    assert not [found for found in collect(store) if found.objects or found.notes] and keys(store) == before
    store.put("datasets/d/20200101T000000-00000000/shard-00000.bin", b"of a killed command")
    store.put(pack_key(UNUSED), b"of a killed push")
    store.put(structure_key(UNUSED), b"of a removed model")
    store.put("elsewhere/file", b"foreign")
    assert sum(len(found.objects) for found in collect(store)) == 3
    assert keys(store) == sorted([*before, "elsewhere/file"])


def test_what_cannot_be_read_is_left_alone(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    put_model(store, "m")
    store.put(version_key("m", 1), b"{")
    store.put("datasets/d/manifest.json", b'{"format": 99}')
    before = keys(store)
    notes = [note for found in collect(store) for note in found.notes]
    assert len(notes) == 2 and "left alone" in notes[0] and "is damaged" in notes[1] and keys(store) == before
    remove(store, "d")
    remove(store, "m", model=True)
    list(collect(store))
    assert not keys(store)


def test_an_unfinished_packing_is_kept_for_a_while(store: ObjectStore) -> None:
    for changes in (3, 4):
        with pytest.raises(Killed):
            pack(A, DyingStore(store, changes), "d", SMALL)  # type: ignore[arg-type]
    before = keys(store)
    (found,) = collect(store)
    assert not found.objects and "hapi pack" in found.notes[0] and keys(store) == before
    (found,) = collect(store, older_than=0)
    assert found.objects and not keys(store)


def test_who_writes_is_not_disturbed(store: ObjectStore) -> None:
    pack(A, store, "d", SMALL)
    store.put("datasets/d/20200101T000000-00000000/shard-00000.bin", b"rest")
    before = keys(store)
    with store.lock("datasets/d/pack.lock"):
        with pytest.raises(ConflictError, match="is being written"):
            remove(store, "d")
        (found,) = collect(store)
        assert not found.objects and "is being written" in found.notes[0]
    assert keys(store) == before


@pytest.mark.parametrize("keep_old", [0.0, DAY])
def test_killed_at_any_change(store: ObjectStore, keep_old: float) -> None:
    """The dataset is whole or gone, and the rest can be collected."""
    changes = 0
    while True:
        pack(A, store, "d", SMALL)
        try:
            remove(DyingStore(store, changes), "d", keep_old=keep_old)  # type: ignore[arg-type]
        except Killed:
            changes += 1
        else:
            break
        summary = describe(store, "d")
        if summary is not None:
            assert np.array_equal(find_dataset(store, "d").read(ALL).data.reshape(-1, 16), A.values)
        list(collect(store))
        assert summary is None or verify_dataset(store, "d").sound
        if summary is not None or store.list("datasets/d"):
            remove(store, "d", keep_old=0)
        assert not keys(store)
    assert changes >= 2


def killed(changes: int, *arguments: str) -> int:
    return killed_storing("delete", "", changes, *arguments)[0]


@pytest.mark.slow
def test_real_kills(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    pack(A, store, "d", SMALL)
    pack(B, store, "d", SMALL, replace=True)
    address = str(tmp_path / "store" / "d")
    assert killed(0, "rm", address, "--yes", "--keep-old", "0") == -signal.SIGKILL
    assert verify_dataset(store, "d").sound
    assert killed(2, "rm", address, "--yes", "--keep-old", "0") == -signal.SIGKILL
    assert describe(store, "d") is None and store.list("datasets/d")
    assert killed(2, "gc", str(tmp_path / "store"), "--yes") == -signal.SIGKILL
    assert killed(99, "gc", str(tmp_path / "store"), "--yes") == 0
    assert not store.list()
    assert not list((tmp_path / "store").rglob("*"))
    pack(A, store, "d", SMALL)
    assert verify_dataset(store, "d").sound
