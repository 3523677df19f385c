"""Locks over real stores without a network, among threads and after owners that died."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import obstore
import pytest
from support.lock_owners import dead, elsewhere, living_elsewhere
from support.threads import at_once

from hapi.errors import ConflictError, NoRoomError, StoreError, UsageError
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.locking.locks import LeaseLostError, LockOwner, after_key, lease_seconds
from hapi.store.locking.named_owners import add_name
from hapi.store.open import open_store

LOCK = "d/pack.lock"


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(
        str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    )


def memory() -> ObjectStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_a_lock_excludes_and_frees(store: ObjectStore) -> None:
    refused = pytest.raises(ConflictError, match=f"is being written by process {os.getpid()} on")
    with store.lock(LOCK) as lease, refused, store.lock(LOCK):
        pass
    lease.raise_if_lost()
    with store.lock(LOCK) as lease:
        lease.check()
        assert store.list_keys("d")[0] == LOCK
    assert store.list() == []


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_lock_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store = LocalStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, broken)
        with pytest.raises(StoreError, match=r"d/pack\.lock: Input/output error"):
            store.lock(LOCK).__enter__()
    with store.lock(LOCK):
        assert store.exists(LOCK)
    with pytest.raises(OSError, match="mine"), store.lock(LOCK):
        raise OSError("mine")
    assert list(tmp_path.rglob("*")) == []


def full(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.owner"))


def test_a_lock_on_a_full_disk_is_an_empty_file_with_its_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        refused = pytest.raises(ConflictError, match=f"is being written by process {os.getpid()};")
        with store.lock(LOCK) as lease, refused, store.lock(LOCK):
            pass
        with store.lock(LOCK) as lease:
            before = (tmp_path / LOCK).stat().st_mtime_ns
            time.sleep(0.01)  # a tick of the file system's clock
            lease.check()
            assert (tmp_path / LOCK).stat().st_size == 0 and (tmp_path / LOCK).stat().st_mtime_ns > before
            (name,) = names(tmp_path)
            assert str(os.getpid()) in name.name and store.list_keys("d") == [LOCK]
            store.clean_temporary("")
            assert names(tmp_path) == [name]
        patched.setattr(Path, "hardlink_to", lambda path, target: full())
        with pytest.raises(NoRoomError, match=r"d/pack\.lock: .*No space left on device; make room"):
            store.lock(LOCK).__enter__()
    assert names(tmp_path) == [] and store.list() == []


@pytest.mark.parametrize("leaves", ["lock", "name"])
def test_an_owner_that_died_on_a_full_disk_is_followed_at_once(tmp_path: Path, leaves: str) -> None:
    """Also one that followed another such; and nothing is left of them."""
    store, owners = LocalStore(tmp_path), [dead(), dead()]
    keys = [LOCK, after_key(LOCK, owners[0].id)]
    for key, owner in zip(keys, owners, strict=True):
        store.put(key, b"")
        add_name(tmp_path / key, owner, OSError())
        if leaves == "name":
            (tmp_path / key).unlink()
    began = time.monotonic()
    with store.lock(LOCK) as lease:
        lease.check()
    assert time.monotonic() - began < 40, "no lease is waited for"
    store.clean_temporary("")
    assert list(tmp_path.rglob("*")) == []


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", none)
    store = LocalStore(tmp_path)
    with store.lock(LOCK) as lease, pytest.raises(ConflictError, match=str(os.getpid())), store.lock(LOCK):
        pass
    lease.raise_if_lost()
    assert store.put_new("x", b"1") and not store.put_new("x", b"2") and store.get("x") == b"1"
    assert [info.key for info in store.list()] == ["x"]


@pytest.mark.parametrize("followed", [False, True])
def test_a_lock_that_was_written_without_a_word_is_ours(
    monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    """The store answers with an error, is asked again, and finds what it wrote."""
    store = memory()
    if followed:
        store.put(LOCK, dead().to_bytes())
    put = obstore.put

    def again(*arguments: Any, **options: Any) -> Any:
        if options.get("mode") == "create":
            put(*arguments, **options)
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", again)
    refused = pytest.raises(ConflictError, match=str(os.getpid()))
    with store.lock(LOCK), refused, store.lock(LOCK):
        pass
    assert store.list() == []


def test_a_dead_owners_lock_is_taken_over_at_once(store: ObjectStore) -> None:
    store.put(LOCK, dead().to_bytes())
    began = time.monotonic()
    with store.lock(LOCK) as lease:
        lease.check()
    assert time.monotonic() - began < 40 and store.list() == []


def test_an_owner_that_cannot_be_seen_is_watched_for_its_lease(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(LOCK, elsewhere(1.0).to_bytes())
    with store.lock(LOCK):
        pass
    assert store.list() == []
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.endswith(
        "its lock is held by process 1 on another-host, for up to 1 s unless that shows a sign of life"
    )
    refused = pytest.raises(ConflictError, match=r"another-host; wait until .*--force-lock")
    with living_elsewhere(store, LOCK), refused, store.lock(LOCK):
        pass


def test_force_does_not_wait(store: ObjectStore) -> None:
    for document in (elsewhere(3600).to_bytes(), b"not json", b""):
        store.put(LOCK, document)
        with store.lock(LOCK, force=True) as lease:
            lease.check()
        assert store.list() == []


def test_an_unreadable_lock_is_no_dead_one(store: ObjectStore) -> None:
    for document in (b"not json", b"[" * 40_000, b'{"id":"../../x","process":{},"lease":1}', b'{"id": 3}'):
        assert LockOwner.from_bytes(document).process is None
        assert LockOwner.from_bytes(document).lives() is None
        assert str(LockOwner.from_bytes(document)) == "an unknown process"
    shortest = b'{"id":"%s","process":%s,"lease":1e-9}' % (
        b"0" * 24,
        b'{"host":"h","boot":"","namespace":0,"pid":0,"started":0}',
    )
    assert LockOwner.from_bytes(shortest).lease == 1.0
    assert LockOwner.from_bytes(shortest.replace(b"1e-9", b"1e99")).lease == 3600
    for no_number in (b"1e999", b"NaN", b'1,"id":"%s"' % (b"0" * 24)):
        assert LockOwner.from_bytes(shortest.replace(b"1e-9", no_number)).process is None


def test_a_lock_taken_by_force_is_lost_to_its_holder(caplog: pytest.LogCaptureFixture) -> None:
    store = memory()
    with store.lock(LOCK) as first:
        with store.lock(LOCK, force=True) as second:
            with pytest.raises(LeaseLostError, match="taken over by process"):
                first.check()
            with pytest.raises(LeaseLostError):
                first.raise_if_lost()
            second.check()
        assert not store.exists(LOCK)
        with store.lock(LOCK) as third:
            third.check()
            with pytest.raises(LeaseLostError):
                first.check()
    assert store.list() == [] and not caplog.records


def test_a_living_holder_of_a_folder_cannot_be_forced(tmp_path: Path) -> None:
    """The kernel knows that it lives; it can be ended here."""
    store = LocalStore(tmp_path)
    with (
        store.lock(LOCK),
        pytest.raises(ConflictError, match=r"wait until it is done$"),
        store.lock(LOCK, force=True),
    ):
        pass


def test_a_lock_that_cannot_be_given_back_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = memory()

    def down(prefix: str) -> Any:
        raise StoreError("the store is down; start it")

    with store.lock(LOCK):
        monkeypatch.setattr(store, "list_keys", down)
    assert [r.getMessage() for r in caplog.records] == [
        f"{store.url}/d: the lock could not be given back: the store is down; start it"
    ]


def test_what_dead_owners_left_goes_with_the_next_lock(store: ObjectStore) -> None:
    for left in (f"{LOCK}.beat-{'a' * 24}", f"{LOCK}.after-{'b' * 24}", "d/pack.locks"):
        store.put(left, b"1")
    with store.lock(LOCK):
        pass
    assert [info.key for info in store.list()] == ["d/pack.locks"]


def test_renewed_in_the_background(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_STORE_LEASE", "1")
    with store.lock(LOCK) as lease:
        before = _beat(store)
        deadline = time.monotonic() + 240
        while _beat(store) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _beat(store) != before
        for key in store.list_keys("d"):
            store.delete(key)
        while time.monotonic() < deadline:
            try:
                lease.raise_if_lost()
            except LeaseLostError:
                break
            time.sleep(0.02)
        with pytest.raises(LeaseLostError, match="removed by another"):
            lease.raise_if_lost()


def _beat(store: ObjectStore) -> list[bytes]:
    return [store.get(key) for key in store.list_keys("d")]


@pytest.mark.parametrize("text", ["0", "x", "nan", "inf", "-3", "1e9"])
def test_leases_that_cannot_be(text: str) -> None:
    assert lease_seconds({}) == 60 and lease_seconds({"HAPI_STORE_LEASE": "5"}) == 5
    with pytest.raises(UsageError, match="HAPI_STORE_LEASE="):
        lease_seconds({"HAPI_STORE_LEASE": text})


def test_one_of_many_threads_gets_the_lock(store: ObjectStore) -> None:
    inside, most, got = 0, 0, 0
    guard = threading.Lock()

    def attempt() -> None:
        nonlocal inside, most, got
        for _ in range(10):
            try:
                with store.lock(LOCK):
                    with guard:
                        inside, got = inside + 1, got + 1
                        most = max(most, inside)
                    time.sleep(0.001)
                    with guard:
                        inside -= 1
            except ConflictError:
                continue

    at_once(6, lambda _: attempt())
    assert most == 1 and got >= 1
    assert store.list() == []


def test_one_of_many_takes_a_dead_owners_lock_over() -> None:
    """At any time at most one of the threads that find the dead lock is inside."""
    for _ in range(20):
        store = memory()
        store.put(LOCK, dead().to_bytes())
        inside: list[int] = []
        seen: list[int] = []

        def attempt(store: ObjectStore = store, inside: list[int] = inside, seen: list[int] = seen) -> None:
            try:
                with store.lock(LOCK):
                    inside.append(1)
                    time.sleep(0.002)
                    seen.append(len(inside))
                    inside.pop()
            except ConflictError:
                return

        at_once(5, lambda _: attempt())
        assert seen and set(seen) == {1}
        assert store.list() == []


def test_marks_and_conditional_writes(store: ObjectStore) -> None:
    assert store.mark("a") is None
    store.put_over("a", b"1", None)
    with pytest.raises(ConflictError, match="by another process"):
        store.put_over("a", b"2", None)
    mark = store.mark("a")
    assert mark == store.mark("a") is not None
    store.put_over("a", b"22", mark)
    with pytest.raises(ConflictError, match="by another process"):
        store.put_over("a", b"333", mark)
    assert store.get("a") == b"22"
    mark = store.mark("a")
    store.delete("a")
    with pytest.raises(ConflictError):
        store.put_over("a", b"4", mark)
    assert not store.exists("a")


def test_a_store_that_cannot_compare_and_write_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    store, put = memory(), obstore.put

    def limited(*arguments: Any, **options: Any) -> Any:
        if isinstance(options.get("mode"), dict):
            raise obstore.exceptions.GenericError("status code: 501 Not Implemented")
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", limited)
    store.put("a", b"1")
    mark = store.mark("a")
    store.put_over("a", b"2", mark)
    with pytest.raises(ConflictError):
        store.put_over("a", b"3", mark)
    assert store.get("a") == b"2"


@pytest.mark.parametrize("new", [False, True])
def test_a_conditional_write_that_was_done_without_a_word(monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    store, put = memory(), obstore.put
    if not new:
        store.put("a", b"1")
    mark = store.mark("a")

    def again(*arguments: Any, **options: Any) -> Any:
        put(*arguments, **options)
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", again)
    store.put_over("a", b"2", mark)
    assert store.get("a") == b"2"
