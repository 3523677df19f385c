"""Blocks of provided packs: right bytes, within the bound, one fetch for all that wait, nothing kept of a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.threads import at_once
from support.waiting import PATIENCE, until

from hapi.errors import StoreError, StoreUnavailableError
from hapi.server.providers import blocks
from hapi.server.providers.blocks import BlockCache
from hapi.store.base import ReadPart, Then, nothing
from hapi.store.remote import RemoteStore

SIZE = 10_000
DATA = bytes(n * 31 % 257 % 256 for n in range(SIZE))


class Counting(RemoteStore):
    """A store in memory that counts what is read of it, and fails when it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(f"memory://{name}")
        self.bytes = 0
        self.error: Exception | None = None
        self.gate: threading.Event | None = None

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        if self.gate is not None:
            self.gate.wait(240)
        if self.error is not None:
            raise self.error
        self.bytes += sum(part.out.nbytes for part in parts)
        super().read_many(parts, then)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Counting]:
    store = Counting(f"blocks-{request.node.name}")
    for key in ("a", "b"):
        store.put(key, DATA)
    yield store


def read(cache: BlockCache, start: int, length: int, key: str = "a") -> bytes:
    part = ReadPart(key, start, memoryview(bytearray(length)))
    cache.read(part)
    return bytes(part.out)


def test_blocks_are_read_once(store: Counting) -> None:
    cache = BlockCache(store, 20_000)
    assert read(cache, 1500, 3000) == DATA[1500:4500]
    assert store.bytes == cache.read_bytes == 4000
    assert read(cache, 1000, 4000) == DATA[1000:5000]
    assert (store.bytes, cache.hit_bytes) == (4000, 4000)
    assert read(cache, 9990, 10) == DATA[9990:]
    assert cache.nbytes == 5000


def test_the_bound_holds_whatever_is_read(store: Counting) -> None:
    cache = BlockCache(store, 3500)
    for key in ("a", "b", "a"):
        assert read(cache, 0, SIZE, key) == DATA
        assert cache.nbytes <= 3500


def test_the_least_recently_used_goes_first(store: Counting) -> None:
    cache = BlockCache(store, 2000)
    for start in (0, 1000, 0, 2000):  # the second is the oldest
        read(cache, start, 10)
    before = store.bytes
    read(cache, 0, 10)
    assert store.bytes == before
    read(cache, 1000, 10)
    assert store.bytes == before + 1000


def test_a_part_past_the_end_is_refused_unread(store: Counting) -> None:
    with pytest.raises(StoreError, match="ends at byte 10000"):
        read(BlockCache(store, 5000), 9999, 2)
    assert store.bytes == 0


def test_all_that_wait_get_what_one_fetches(store: Counting) -> None:
    cache = BlockCache(store, 20_000)
    store.gate = threading.Event()
    with ThreadPoolExecutor(8) as readers:
        running = [readers.submit(read, cache, 0, SIZE) for _ in range(8)]
        store.gate.set()
        assert all(reading.result(240) == DATA for reading in running)
    assert store.bytes == SIZE


def test_a_failure_reaches_all_that_wait_and_leaves_nothing(store: Counting) -> None:
    cache = BlockCache(store, 20_000)
    store.error = StoreUnavailableError("away")

    def failed(_: int) -> None:
        with pytest.raises(StoreUnavailableError):
            read(cache, 0, 1000)

    at_once(4, failed)
    store.error = None
    assert read(cache, 0, 1000) == DATA[:1000]


class FailsFirst(Counting):
    """A store whose first read waits, and then fails."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.first = threading.Event()
        self.reads = 0

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        self.reads += 1
        if self.reads == 1:
            self.first.wait(PATIENCE)
            raise StoreUnavailableError("the request was given up")
        super().read_many(parts, then)


def test_the_failure_of_one_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the client of the one went away: those that wait for its block fetch it themselves."""
    store, waits = FailsFirst("blocks-fails-first"), threading.Semaphore(0)
    store.put("a", DATA)
    cache, wait_for = BlockCache(store, 20_000), blocks.result

    def noted(future: Future[memoryview]) -> memoryview:
        waits.release()
        return wait_for(future)

    monkeypatch.setattr(blocks, "result", noted)
    with ThreadPoolExecutor(4) as readers:
        first = readers.submit(read, cache, 0, 2000)
        until(lambda: store.reads == 1, PATIENCE, "the first read")
        others = [readers.submit(read, cache, 0, 2000) for _ in range(3)]
        for _ in others:
            assert waits.acquire(timeout=PATIENCE)
        store.first.set()
        with pytest.raises(StoreUnavailableError):
            first.result(PATIENCE)
        assert all(other.result(PATIENCE) == DATA[:2000] for other in others)
    assert store.bytes == 2000 and read(cache, 0, 2000) == DATA[:2000]


def test_an_object_that_was_cut_short_and_repaired(store: Counting) -> None:
    cache = BlockCache(store, 20_000)
    store.put("a", DATA[:3300])
    assert read(cache, 3000, 300) == DATA[3000:3300]
    with pytest.raises(StoreError, match="ends at byte 3300"):
        read(cache, 3000, 400)
    store.put("a", DATA)
    assert read(cache, 3000, 400) == DATA[3000:3400] and read(cache, 0, SIZE) == DATA


def test_what_is_forgotten_is_read_again(store: Counting) -> None:
    cache = BlockCache(store, 20_000)
    read(cache, 0, 2000)
    read(cache, 0, 2000, "b")
    cache.forget("a")
    before = store.bytes
    read(cache, 0, 2000, "b")
    assert store.bytes == before
    read(cache, 0, 2000)
    assert store.bytes == before + 2000


class InTurn(Counting):
    """Each read waits for its own gate, and brings what is given with it."""

    def __init__(self, name: str, turns: list[tuple[threading.Event, bytes]]) -> None:
        super().__init__(name)
        self.turns = turns

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        gate, data = self.turns.pop(0)
        gate.wait(PATIENCE)
        for part in parts:
            part.out[:] = data[part.start : part.start + part.out.nbytes]


def test_what_was_forgotten_on_its_way_does_not_take_the_place_of_what_came_for_it() -> None:
    first, second = threading.Event(), threading.Event()
    store = InTurn("blocks-in-turn", [(first, bytes(SIZE)), (second, DATA)])
    store.put("a", DATA)
    cache = BlockCache(store, 20_000)
    with ThreadPoolExecutor(2) as readers:
        damaged = readers.submit(read, cache, 0, 1000)
        until(lambda: len(store.turns) == 1, 20, "the first read")
        cache.forget("a")
        again = readers.submit(read, cache, 0, 1000)
        until(lambda: not store.turns, 20, "the second read")
        first.set()
        assert damaged.result(PATIENCE) == bytes(1000)
        second.set()
        assert again.result(PATIENCE) == DATA[:1000]
    assert read(cache, 0, 1000) == DATA[:1000]


@given(
    reads=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=10),
    bound=st.integers(1000, 12_000),
)
def test_any_reads_with_any_bound(reads: list[tuple[int, int]], bound: int) -> None:
    store = Counting("blocks-any")
    store.put("a", DATA)
    cache = BlockCache(store, bound)
    for start, length in reads:
        length = min(length, SIZE - start)
        assert read(cache, start, length) == DATA[start : start + length]
        assert cache.nbytes <= bound
