"""Loads of tensors: the same bytes from any store to any place, in order, each content read once."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.loading_tools import (
    WatchedSource,
    flip,
    loading_threads,
    some_tensors,
    write_large,
    write_pack,
)

from hapi.errors import DataError, NotFoundError, StoreError, UsageError
from hapi.models.tensors import STORED_NAMES
from hapi.repository.entries import TensorEntry
from hapi.repository.loading import readers
from hapi.repository.loading.checks import VERIFIED
from hapi.repository.loading.landing import DeviceLanding
from hapi.repository.loading.load import Loaded, load, plan_of, traits_of
from hapi.repository.loading.pool import LoadingPool
from hapi.store.base import ObjectStore, ReadPart
from hapi.store.open import open_store

MB = 1 << 20


@pytest.fixture(params=["local", pytest.param("memory", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{request.node.name}")


@pytest.fixture(params=["host", "host, pool off", "staged"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LoadingPool:
    """Pools of few buffers; loads to a device are tried with the host as the device."""
    if request.param == "staged":
        monkeypatch.setattr("hapi.repository.loading.load.landing", DeviceLanding)
    return LoadingPool(on=request.param != "host, pool off", idle_limit=64 * MB, buffers=3)


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 240
    while loading_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not loading_threads()


def check_equal(found: Iterator[Loaded], tensors: list[tuple[str, torch.Tensor]]) -> None:
    loaded = list(found)
    assert [entry.name for entry, _ in loaded] == [name for name, _ in tensors]
    for (_, got), (name, expected) in zip(loaded, tensors, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape, name
        assert torch.equal(got, expected), name


def test_every_element_type_and_shape(store: ObjectStore, pool: LoadingPool) -> None:
    tensors = [
        (str(dtype), (torch.randn(7, 5) * 50).to(dtype) if dtype != torch.bool else torch.randn(7, 5) > 0)
        for dtype in STORED_NAMES
    ]
    tensors += [("scalar", torch.tensor(3)), ("empty", torch.empty(0, 4)), ("odd", torch.ones(3).bfloat16())]
    check_equal(load(store, write_pack(store, tensors), pool=pool), tensors)


@pytest.mark.slow_except("local-host, pool off")
def test_small_and_large_tensors_of_several_packs(store: ObjectStore, pool: LoadingPool) -> None:
    first = [*some_tensors(30), ("large", torch.randn(3_000_000))]
    second = some_tensors(20, seed=1, most=700_000)
    entries = write_pack(store, first) + write_pack(store, second, "packs/two", head=72, gap=24)
    tensors = [*first, *second]
    order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(1)).tolist()
    for _ in range(2):  # the second load has the memory of the first
        check_equal(load(store, entries, pool=pool), tensors)
        check_equal(load(store, [entries[n] for n in order], pool=pool), [tensors[n] for n in order])


def test_a_thousand_tiny_tensors(store: ObjectStore, pool: LoadingPool) -> None:
    tensors = some_tensors(1000, most=20)
    check_equal(load(store, write_pack(store, tensors), pool=pool), tensors)


def test_equal_content_is_read_once_and_lies_apart(store: ObjectStore, pool: LoadingPool) -> None:
    one = torch.randn(300_000)
    named = [("a", one), ("b", torch.ones(5)), ("c", one.clone()), ("d", one.reshape(300, 1000))]
    entries = write_pack(store, named)
    source = WatchedSource(store)
    found = []
    for entry, tensor in load(source, entries, pool=pool):
        found.append((entry.name, tensor.clone()))
        tensor.zero_()  # the next one of this content is not changed by it
    assert all(torch.equal(got, expected) for (_, got), (_, expected) in zip(found, named, strict=True))
    assert source.nbytes == one.nbytes + 20 == plan_of(entries, traits_of(store)).moved


def test_no_byte_is_read_twice_and_few_in_vain(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    entries = write_pack(store, some_tensors(60, most=200_000), gap=56)
    source = WatchedSource(store)
    part = [entry for n, entry in enumerate(entries) if n % 3]
    for _ in load(source, part):
        pass
    assert source.nbytes == sum(entry.nbytes for entry in part)
    for traits in (traits_of(store), traits_of(source)):
        assert plan_of(part, traits).moved <= 1.01 * source.nbytes


@pytest.mark.parametrize(
    ("whole", "range_bytes"), [(0, 8), (127, 8), (128, 16), (511, 56), (512, 64), (4096, 64)]
)
def test_ranges_of_servers_are_long_but_several_to_a_connection(
    store: ObjectStore, whole: int, range_bytes: int
) -> None:
    assert traits_of(WatchedSource(store), whole << 20).range_bytes == range_bytes << 20


def test_nothing_is_read_before_it_is_asked_for(store: ObjectStore, pool: LoadingPool) -> None:
    source = WatchedSource(store)
    found = load(source, write_pack(store, some_tensors(3)), pool=pool)
    assert source.nbytes == 0
    assert len(list(found)) == 3
    assert list(load(source, [], pool=pool)) == []


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_damaged_tensor_is_named_with_its_place(
    store: ObjectStore, pool: LoadingPool, position: str
) -> None:
    entries = write_pack(
        store, [*some_tensors(5), ("conv.weight", torch.randn(3_000_000)), ("b", torch.ones(2))]
    )
    flip(store, entries[5], {"first": 0, "middle": 5 * MB, "last": 12_000_000 - 1}[position])
    found = []
    with pytest.raises(
        DataError, match=rf"packs/one.*'conv.weight' \(from byte {entries[5].start}\).*damaged"
    ):
        for entry, _ in load(store, entries, pool=pool):
            found.append(entry.name)
    assert found == [entry.name for entry in entries[: len(found)]] and len(found) <= 5
    check_equal(load(store, entries[:2], pool=pool), [(e.name, t) for e, t in load(store, entries[:2])])


def test_the_owner_says_what_damage_means(store: ObjectStore, pool: LoadingPool) -> None:
    entries = write_pack(store, some_tensors(1))
    flip(store, entries[0])
    with pytest.raises(DataError, match=r"model 'm', tensor 'layer\.0\.weight'"):
        list(load(store, entries, pool=pool, damaged=lambda e: DataError(f"model 'm', tensor {e.name!r}")))


def test_identity_is_verified_once_and_damage_always(store: ObjectStore, pool: LoadingPool) -> None:
    entries = write_pack(store, some_tensors(3))
    forged = [TensorEntry(e.name, e.dtype, e.shape, "0" * 31 + str(n), e.checksum, e.pack, e.start)
              for n, e in enumerate(entries)]  # fmt: skip
    assert len(list(load(store, forged, pool=pool))) == 3  # nobody else relies on the digest
    for _ in range(2):
        with pytest.raises(DataError, match=r"layer\.0\.weight"):
            list(load(store, forged, pool=pool, verify="identity"))
    assert len(list(load(store, entries, pool=pool, verify="identity"))) == 3
    assert all((store.url, e.pack, e.start, e.digest) in VERIFIED for e in entries)
    flip(store, entries[1])
    with pytest.raises(DataError, match=r"layer\.1\.weight"):
        list(load(store, entries, pool=pool, verify="identity"))
    with pytest.raises(UsageError, match="'sha'"):
        load(store, entries, verify="sha")


def test_missing_and_short_objects(store: ObjectStore, pool: LoadingPool) -> None:
    entries = write_pack(store, [("w", torch.empty(5 * MB).fill_(1.5)), ("v", torch.randn(10))])
    store.put("packs/one", store.get("packs/one", 100 * MB)[: 1 * MB])
    with pytest.raises(StoreError, match="packs/one"):
        list(load(store, entries, pool=pool))
    with pytest.raises(StoreError, match="packs/one"):
        list(load(store, entries[1:], pool=pool))
    store.delete("packs/one")
    with pytest.raises(NotFoundError, match="packs/one"):
        list(load(store, entries[1:], pool=pool))


@pytest.mark.slow_cases("host")
def test_the_first_error_of_a_reader_ends_the_others(tmp_path: Path, pool: LoadingPool) -> None:
    store = open_store(str(tmp_path))
    _, entries = write_large(store, 8, 2 * MB)

    def fail(part: ReadPart) -> None:
        if part.start > entries[6].start:
            raise StoreError("the disk is gone")

    source = WatchedSource(store, fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        list(load(source, entries, pool=pool))
    assert source.nbytes < sum(entry.nbytes for entry in entries)


def test_a_load_that_is_closed_leaves_no_reader(
    tmp_path: Path, pool: LoadingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "AHEAD_BYTES", 8 * MB)
    store = open_store(str(tmp_path))
    _, entries = write_large(store, 8, 2 * MB)
    source = WatchedSource(store)
    with closing(load(source, entries, pool=pool)) as found:
        next(found)
    read = source.nbytes
    assert source.nbytes == read < sum(entry.nbytes for entry in entries)
    assert len(list(load(store, entries, pool=pool))) == 8  # no buffer was lost


@pytest.mark.slow_cases("host")
def test_readers_wait_for_a_slow_caller(
    tmp_path: Path, pool: LoadingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "AHEAD_BYTES", 20 * MB)
    store = open_store(str(tmp_path))
    _, entries = write_large(store, 20, MB)
    source = WatchedSource(store)
    taken = 0
    for entry, tensor in load(source, entries, pool=pool):
        assert source.nbytes <= taken + 20 * MB + 5 * 8 * MB
        taken += entry.nbytes
        del tensor
    assert source.nbytes == taken


def test_what_follows_a_large_tensor_is_read_while_the_caller_has_it(
    tmp_path: Path, pool: LoadingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "AHEAD_BYTES", MB)
    store = open_store(str(tmp_path))
    tensors, entries = write_large(store, 3, 4 * MB)
    read = threading.Event()

    def note(part: ReadPart) -> None:
        if part.start >= entries[1].start:
            read.set()

    found = load(WatchedSource(store, note), entries, pool=pool)
    first = next(found)
    assert read.wait(240)
    check_equal(iter([first, *found]), tensors)


@pytest.mark.slow_except("host, pool off")
def test_loads_that_are_mixed_in_one_thread_and_run_in_several(tmp_path: Path, pool: LoadingPool) -> None:
    store = open_store(str(tmp_path))
    tensors, entries = write_large(store, 8, MB)
    source = WatchedSource(store)
    mixed = list(zip(*(load(source, entries, pool=pool) for _ in range(5)), strict=True))
    assert all(torch.equal(got, tensors[n][1]) for n, five in enumerate(mixed) for _, got in five)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            check_equal(load(source, entries, pool=pool), tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_several_readers_share_a_large_tensor(tmp_path: Path, pool: LoadingPool) -> None:
    store = open_store(str(tmp_path))
    tensors, entries = write_large(store, 1, 12 * MB)
    meeting = threading.Barrier(2, timeout=240)
    met = threading.Event()

    def meet(part: ReadPart) -> None:
        if not met.is_set():
            meeting.wait()
            met.set()

    source = WatchedSource(store, meet)
    check_equal(load(source, entries, pool=pool), tensors)
    assert len(source.readers) >= 2


def test_tensors_are_aligned_and_alone_in_their_storage(store: ObjectStore, pool: LoadingPool) -> None:
    tensors = some_tensors(40, most=100_000)
    for _, tensor in load(store, write_pack(store, tensors, head=8), pool=pool):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.slow
def test_memory_of_dead_tensors_serves_the_next_load(tmp_path: Path) -> None:
    store, pool = open_store(str(tmp_path)), LoadingPool(idle_limit=200 * MB)
    _, entries = write_large(store, 6, 4 * MB)
    places = [{t.data_ptr() for _, t in list(load(store, entries, pool=pool))} for _ in range(3)]
    gc.collect()
    assert places[0] == places[1] == places[2]
    assert pool.memory.mapped_bytes < 2 * sum(entry.nbytes for entry in entries)
