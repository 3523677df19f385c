"""The object-store interface, the same checks over every backend that runs without a network."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.atomic import partial_name
from hapi.data.listing import list_datasets
from hapi.errors import BadRequestError, DataError, NotFoundError, StoreError, UsageError
from hapi.store.base import ObjectStore, ReadPart, Then, check_key
from hapi.store.coalesce import COALESCE_GAP, SLICE_BYTES, Fetch, coalesced
from hapi.store.local import LocalStore
from hapi.store.open import open_store, split_address
from hapi.store.remote import RemoteStore


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    urls = {
        "folder": str(tmp_path / "store"),
        "file": f"file://{tmp_path}/with%20space",
        "memory": f"memory://{uuid.uuid4().hex}",
    }
    return open_store(urls[request.param])


def memory() -> ObjectStore:
    """A new store that is remote as far as it can be without a network."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_round_trip(store: ObjectStore) -> None:
    store.put("a/b.bin", bytes(range(200)))
    assert store.get("a/b.bin") == bytes(range(200))
    assert store.size("a/b.bin") == 200
    assert store.exists("a/b.bin") and not store.exists("a/c.bin")
    out = bytearray(10)
    store.read_into("a/b.bin", 190, memoryview(out))
    assert bytes(out) == bytes(range(190, 200))
    ranges = store.read_ranges("a/b.bin", [100, 0, 7], [110, 0, 9])
    assert [bytes(r) for r in ranges] == [bytes(range(100, 110)), b"", bytes([7, 8])]
    store.put("a/b.bin", b"new")
    assert store.get("a/b.bin") == b"new"
    store.put("empty", b"")
    assert store.get("empty") == b"" and store.size("empty") == 0


def test_put_takes_buffers_of_other_types(store: ObjectStore) -> None:
    import numpy as np

    values = np.arange(4, dtype=np.float32)
    store.put("v", values.data)
    assert store.get("v") == values.tobytes()


def test_short_ranges_and_missing_objects_raise(store: ObjectStore) -> None:
    store.put("x", b"0123456789")
    for start, length in ((5, 6), (10, 1), (1000, 4)):
        with pytest.raises(StoreError):
            store.read_into("x", start, memoryview(bytearray(length)))
    with pytest.raises(BadRequestError):
        store.read_ranges("x", [3], [2])
    for call in (store.get, store.size, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
        with pytest.raises(NotFoundError, match="nothing-here"):
            call("nothing-here")


def test_parts_are_told_of_once_they_are_there(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.store.coalesce.SLICE_BYTES", 7)
    store.put("x", bytes(range(100)))
    store.put("y", bytes(range(100, 150)))
    places = [("x", 90, 10), ("y", 0, 50), ("x", 0, 20), ("x", 5, 5), ("x", 3, 0)]
    outs = [bytearray(length) for _, _, length in places]
    told: list[int] = []

    def then(number: int) -> None:
        key, start, length = places[number]
        first = start + (100 if key == "y" else 0)
        assert bytes(outs[number]) == bytes(range(first, first + length))
        told.append(number)

    parts = [ReadPart(key, start, memoryview(o)) for (key, start, _), o in zip(places, outs, strict=True)]
    store.read_many(parts, then)
    assert sorted(told) == [0, 1, 2, 3, 4]


def test_after_a_failure_nobody_writes_into_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not begun is not begun any more: others wait for the same few threads."""
    monkeypatch.setattr("hapi.store.coalesce.SLICE_BYTES", 10)
    store = memory()
    store.put("x", bytes([1]) * 1000)
    whole, began, ended = RemoteStore._fetch, [], []

    def fetch(self: RemoteStore, one: Fetch, then: Then) -> None:
        began.append(one.start)
        if one.start == 0:
            raise StoreError("the store is down; start it")
        time.sleep(0.3)
        whole(self, one, then)
        ended.append(one.start)

    monkeypatch.setattr(RemoteStore, "_fetch", fetch)
    out = bytearray(1000)
    with pytest.raises(StoreError, match="is down"):
        store.read_into("x", 0, memoryview(out))
    assert sorted(began) == sorted([0, *ended]) and len(began) < 50
    before = bytes(out)
    time.sleep(0.4)
    assert bytes(out) == before and len(began) == 1 + len(ended)


def test_whoever_presses_ctrl_c_twice_has_no_late_writers_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a cache go to others afterwards, who do not check them again."""
    monkeypatch.setattr("hapi.store.coalesce.SLICE_BYTES", 10)
    store, whole, ended = memory(), RemoteStore._fetch, []
    store.put("x", bytes(80))

    began, pressed = threading.Event(), threading.Event()

    def fetch(self: RemoteStore, one: Fetch, then: Then) -> None:
        began.set()
        assert pressed.wait(240)
        time.sleep(0.3)
        whole(self, one, then)
        ended.append(one.start)

    def press() -> None:
        assert began.wait(240)
        for _ in range(3):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        pressed.set()

    monkeypatch.setattr(RemoteStore, "_fetch", fetch)
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        store.read_into("x", 0, memoryview(bytearray(80)))
    assert len(ended) == 8
    pressing.join()


def test_pieces_may_be_read_from_the_same_store(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection does that packs anew. What a piece raises is raised, and there is no object then."""
    monkeypatch.setattr("hapi.store.remote.UPLOAD_BYTES", 1000)
    content = bytes(range(256)) * 20
    store.put("x", content)

    def pieces(fails: bool) -> Iterator[memoryview]:
        for start in range(0, len(content), 512):
            if fails and start > 3000:
                raise DataError("damaged")
            yield store.read_ranges("x", [start], [start + 512])[0]

    store.put_pieces("y", len(content), pieces(fails=False))
    assert store.get("y") == content
    with pytest.raises(DataError, match=r"^damaged$"):
        store.put_pieces("z", len(content), pieces(fails=True))
    assert not store.exists("z")


def test_an_upload_that_fails_takes_no_more_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(store: object, path: str, pieces: Iterator[bytes], **options: object) -> None:
        next(pieces)
        raise obstore.exceptions.GenericError("the disk is full")

    monkeypatch.setattr("hapi.store.remote.UPLOAD_BYTES", 1000)
    monkeypatch.setattr(obstore, "put", fail)
    made = []
    with pytest.raises(StoreError, match="the disk is full"):
        memory().put_pieces(
            "x", 10**6, (memoryview(bytes(1000)) for n in range(1000) if made.append(n) is None)
        )
    assert len(made) < 10


@pytest.mark.parametrize("flag", [None, 1 << 20])
def test_a_system_that_cannot_tell_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int | None
) -> None:
    monkeypatch.setattr("hapi.store.local._NO_WAIT", flag)
    store = LocalStore(tmp_path)
    store.put("x", bytes(range(100)))
    assert [bytes(r) for r in store.read_ranges("x", [3, 50], [9, 60])] == [
        bytes(range(3, 9)),
        bytes(range(50, 60)),
    ]


def test_announcing_is_never_an_error(store: ObjectStore) -> None:
    store.put("x", b"12345")
    store.announce([("nothing-here", 0, 5), ("x", 1, 3), ("x", 0, 1 << 40)])
    assert [bytes(r) for r in store.read_ranges("x", [1], [3])] == [b"23"]


def test_listing(store: ObjectStore) -> None:
    assert store.list("datasets") == [] and store.list_names("datasets") == []
    for key in (
        "datasets/a/m.json",
        "datasets/a/p/s.bin",
        "datasets/b/m.json",
        "datasets-not/x",
        "datasets/top",
    ):
        store.put(key, b"12")
    assert [i.key for i in store.list("datasets/a")] == ["datasets/a/m.json", "datasets/a/p/s.bin"]
    assert [i.size for i in store.list("datasets/a/")] == [2, 2]
    assert len(store.list()) == 5
    assert store.list_names("datasets") == ["a", "b"]
    assert store.list_names("") == ["datasets", "datasets-not"]
    store.delete("datasets/a/p/s.bin")
    store.delete("datasets/a/p/s.bin")
    assert store.list_names("datasets/a") == []


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match="file is no folder; name another store, or remove it"):
        store.put("a/b", b"x")
    with (
        pytest.raises(StoreError, match="file is no folder; name another store, or remove it"),
        store.lock("a/lock"),
    ):
        pass


def test_listing_follows_links(tmp_path: Path) -> None:
    """Each folder once, under its own name if it has one; a link that leads nowhere hides nothing else."""
    inside, outside = tmp_path / "store", tmp_path / "outside"
    for path in (inside / "own" / "x", outside / "deep" / "y", outside / ".hidden" / "z"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12")
    (inside / "a").symlink_to(inside / "own")
    (inside / "b").symlink_to(outside)
    (inside / "c").symlink_to(outside)
    (inside / "file").symlink_to(outside / "deep" / "y")
    (outside / "up").symlink_to(inside)
    (inside / "own" / "gone").symlink_to(tmp_path / "nowhere")
    (inside / "own" / "round").symlink_to("round")
    store = LocalStore(inside)
    assert [i.key for i in store.list()] == ["b/deep/y", "file", "own/x"]
    assert [(i.key, i.size) for i in store.list("b")] == [
        ("b/deep/y", 2),
        ("b/up/file", 2),
        ("b/up/own/x", 2),
    ]
    assert [i.key for i in store.list("own")] == ["own/x"] and store.get("b/deep/y") == b"12"
    assert store.list("own/gone") == store.list("own/round") == store.list("file") == []


def test_a_file_that_goes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a/x", b"1")
    scandir = os.scandir

    def late(folder: str) -> Any:
        entries = list(scandir(folder))
        if folder.endswith("/a"):
            (tmp_path / "a" / "x").rename(tmp_path / "b")
        return contextlib.nullcontext(entries)

    monkeypatch.setattr(os, "scandir", late)
    assert [i.key for i in store.list()] == []


def test_marks_of_change(store: ObjectStore) -> None:
    store.put("a", b"12")
    store.put("b", b"12")
    if (local := store.local_path("a")) is not None:
        os.utime(local, (1, 1))  # clocks of file systems tick every few milliseconds
    before = store.list()
    assert before == store.list() and [i.changed for i in before] == [i.changed for i in store.list()]
    store.put("a", b"34")
    after = store.list()
    assert after == before, "the mark is no part of what an object is"
    assert after[0].changed != before[0].changed and after[1].changed == before[1].changed != ""


def test_what_may_not_be_looked_at_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for name in ("open", "shut"):
        store.put(f"datasets/{name}/packing.json", b"")
    look = Path.stat

    def denied(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if "shut" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(StoreError, match="shut/x: Permission denied"):
        store.exists("datasets/shut/x")
    assert store.exists("datasets/open/packing.json") and not store.exists("datasets/open/x")
    assert not store.exists("datasets/open")
    with pytest.raises(StoreError, match="shut: Permission denied"):
        LocalStore(tmp_path / "datasets" / "shut").ping()
    sound, bad = list_datasets(store)
    assert sound.state == "incomplete" and bad.state == "damaged"
    assert bad.name == "shut" and "Permission denied" in str(bad.problem)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.tmp-1", "a\0b", "a\\b"]
)
def test_hostile_keys(store: ObjectStore, key: str) -> None:
    calls = (store.get, store.size, store.delete, store.exists, store.local_path, lambda k: store.put(k, b""))
    for call in calls:
        with pytest.raises(BadRequestError):
            call(key)


@given(st.text(max_size=30))
def test_checked_keys_stay_inside(key: str) -> None:
    try:
        check_key(key)
    except BadRequestError:
        return
    assert os.path.normpath(f"/root/{key}") == f"/root/{key}"


def test_memory_store_is_shared_by_name() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}").put("k", b"1")
    assert open_store(f"memory://{name}").get("k") == b"1"
    assert not open_store(f"memory://{name}-other").exists("k")


def test_no_temporary_files_are_left_or_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/x", b"1")
    dead = f"{'0' * 32}-1-1-1.{'0' * 12}.partial"
    for folder in (tmp_path / "a", tmp_path / "a" / "killed"):
        folder.mkdir(exist_ok=True)
        (folder / f".x.{dead}").write_bytes(b"half")
    own = tmp_path / "a" / partial_name("x")
    own.write_bytes(b"being written")
    assert [i.key for i in store.list()] == ["a/x"]
    store.clean_temporary("a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [own.name, "x"]


def test_local_path(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).local_path("a/b") == tmp_path / "a" / "b"
    assert open_store("memory://paths").local_path("a/b") is None


def test_unwritable_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        open_store(str(tmp_path / "file")).put("a/b", b"1")
    with pytest.raises(NotFoundError, match="no folder"):
        open_store(str(tmp_path / "missing")).ping()
    with pytest.raises(NotFoundError, match="file is a file; name the folder of a store"):
        open_store(str(tmp_path / "file")).ping()


@pytest.mark.parametrize("url", ["", "ftp://host/x", "file://host/x", "a\0b", "s4://x", "s3://"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_split_address() -> None:
    assert split_address("store/digits") == ("store", "digits")
    assert split_address("/a/b/digits") == ("/a/b", "digits")
    assert split_address("s3://bucket/pre/digits") == ("s3://bucket/pre", "digits")
    assert split_address("memory://m/digits") == ("memory://m", "digits")
    for wrong in ("digits", "store/", "s3://bucket", "memory://x", "store/..", "store/.x", "store/a b", ""):
        with pytest.raises(UsageError):
            split_address(wrong)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 4 * SLICE_BYTES), st.integers(1, 5000)), max_size=12
    )
)
def test_coalescing_covers_every_part_and_bounds_requests(wanted: list[tuple[str, int, int]]) -> None:
    parts = [ReadPart(key, start, memoryview(bytearray(length))) for key, start, length in wanted]
    fetches = coalesced(parts)
    assert sum(len(p.out) for f in fetches for p in f.parts) == sum(length for _, _, length in wanted)
    for fetch in fetches:
        assert fetch.stop - fetch.start <= SLICE_BYTES
        assert all(p.key == fetch.key and fetch.start <= p.start for p in fetch.parts)
        assert all(p.start + len(p.out) <= fetch.stop for p in fetch.parts)
    waste = sum(f.stop - f.start for f in fetches) - sum(length for _, _, length in wanted)
    assert waste <= COALESCE_GAP * max(0, len(wanted) - 1)


@pytest.fixture(scope="module")
def in_stretches(tmp_path_factory: pytest.TempPathFactory) -> tuple[RemoteStore, bytes]:
    """A store that answers in stretches of 8 KiB, and the object ``x`` of it."""
    data = os.urandom(100_000)
    (tmp_path := tmp_path_factory.mktemp("stretches")).joinpath("x").write_bytes(data)
    return RemoteStore(f"file://{tmp_path}"), data


@given(
    wanted=st.lists(st.tuples(st.integers(0, 99_000), st.integers(0, 30_000)), min_size=1, max_size=12),
    piece=st.sampled_from([9_000, 40_000, SLICE_BYTES]),
)
def test_what_comes_in_stretches_goes_where_it_belongs(
    in_stretches: tuple[RemoteStore, bytes], wanted: list[tuple[int, int]], piece: int
) -> None:
    """Also where parts overlap, hold each other, leave gaps, and end in the middle of a stretch."""
    store, data = in_stretches
    stops = [min(start + length, len(data)) for start, length in wanted]
    outs = [bytearray(stop - start) for (start, _), stop in zip(wanted, stops, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hapi.store.coalesce.SLICE_BYTES", piece)
        patch.setattr("hapi.store.remote.RECEIVED_BYTES", 1)
        parts = [ReadPart("x", start, memoryview(o)) for (start, _), o in zip(wanted, outs, strict=True)]
        store.read_many(parts)
    for out, (start, _), stop in zip(outs, wanted, stops, strict=True):
        assert out == data[start:stop]


def test_large_remote_read_is_split_and_whole() -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    data = os.urandom(1 << 20) * 20
    store.put("big", data)
    out = bytearray(len(data) - 3)
    store.read_into("big", 3, memoryview(out))
    assert out == data[3:]


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "gs://", "az://"])
def test_a_url_without_a_bucket(url: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(
        UsageError, match=rf"^store '{url}': names no bucket or container; write {scheme}://BUCKET"
    ):
        open_store(url)


def _dead_store_seconds(monkeypatch: pytest.MonkeyPatch, port: int) -> float:
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    began = time.monotonic()
    with pytest.raises(StoreError, match="s3://bucket"):
        open_store("s3://bucket/prefix").get("x")
    return time.monotonic() - began


def test_refusing_store_fails_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:  # it does not listen, and nobody else gets its port
        deaf.bind(("127.0.0.1", 0))
        assert _dead_store_seconds(monkeypatch, deaf.getsockname()[1]) < 60


@pytest.mark.slow
def test_silent_store_fails_within_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        # Half a minute, and another two for a machine that stands still; without a bound of ours it takes 180 s.
        assert _dead_store_seconds(monkeypatch, silent.getsockname()[1]) < 150


def _use_in_child(store: ObjectStore, answer: object) -> None:
    try:
        store.get("k")
    except StoreError as error:
        answer.put(str(error))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_store_says_so_instead_of_hanging() -> None:
    store = open_store("memory://fork")
    store.put("k", b"1")
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_use_in_child, args=(store, answer))
    child.start()
    assert "fork" in answer.get(timeout=240)
    child.join(240)
    assert child.exitcode == 0
