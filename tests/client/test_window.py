"""The window: whole batches, in order, exactly once, whatever arrives when and whoever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_server import SHAPE, FakeServer, features_of

from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.fetching import Fetcher
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.prefetcher import Prefetcher
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.transport import server_pool as servers
from hapi.client.transport.server_pool import ServerPool
from hapi.data.manifest import SampleLayout
from hapi.errors import (
    BusyError,
    DataError,
    DeviceMemoryError,
    HapiError,
    StoreError,
    TransportError,
    WireError,
)
from hapi.trace import Tracer
from hapi.wire.references import DatasetReference, ModelReference
from hapi.wire.transport.http import LoopbackTransport

JOB = ExtractionJob(
    dataset=DatasetReference(name="fake", version="0" * 16),
    layout=SampleLayout(kind="encoded"),
    mean_stored_bytes=100,
    transform=None,
    split=2,
    split_name="two",
    model=ModelReference(source="zoo", name="fake", weights="random:0", digest="0" * 32),
    shape=SHAPE,
    dtype=torch.float32,
)


def make_window(
    servers: list[FakeServer],
    batches: list[np.ndarray],
    *,
    request_size: int = 8,
    in_flight: int = 4,
    budget: int = 1 << 20,
    patience: float = 200.0,
    check: bool = True,
) -> tuple[Prefetcher, ServerPool]:
    pool = ServerPool(
        [LoopbackTransport(s, f"fake:{i}") for i, s in enumerate(servers)], retry_timeout=patience
    )
    loading = PassLoading(
        servers=pool,
        traffic=Traffic(pool.received_bytes),
        buffers=BufferPool(),
        tracer=Tracer(enabled=False),
        codecs=WireCodecs("none"),
        request_size=request_size,
        in_flight=in_flight,
        budget=budget,
        check=check,
    )
    return Prefetcher(lambda number: JOB, batches, loading), pool


def batches_of(count: int, size: int, seed: int = 1) -> list[np.ndarray]:
    order = np.random.default_rng(seed).permutation(count).astype(np.int64)
    return [order[i : i + size] for i in range(0, count, size)]


def check_all(window: Prefetcher, batches: list[np.ndarray]) -> None:
    count = 0
    for batch, ids in zip(window, batches, strict=True):
        assert batch.ids.tolist() == ids.tolist()
        assert batch.fetched is not None and batch.kept is None
        np.testing.assert_array_equal(batch.fetched.features.numpy(), features_of(ids))
        np.testing.assert_array_equal(batch.fetched.labels.numpy(), ids % 7)
        count += 1
    assert count == len(batches)


@settings(max_examples=25)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(1, 50),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0, 2000, 1 << 20]),
)
def test_any_sizes_any_order_of_arrival(
    count: int, batch_size: int, cos_batch: int, request_size: int, in_flight: int, servers: int, budget: int
) -> None:
    fakes = [FakeServer(cos_batch, delay=0.0005, seed=i) for i in range(servers)]
    batches = batches_of(count, batch_size)
    window, _ = make_window(fakes, batches, request_size=request_size, in_flight=in_flight, budget=budget)
    try:
        check_all(window, batches)
        asked = [i for f in fakes for i in f.asked]
        assert set(asked) == set(range(count))
        assert len(asked) - count <= request_size * window.loading.traffic.extra_requests
    finally:
        window.close()


def test_a_sample_that_arrives_twice_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took another one's place, or trains twice."""

    class Twice(Fetcher):
        def __init__(self, *given: Any, arrived: Callable[..., None], **named: Any) -> None:
            def again(*of: Any) -> None:
                arrived(*of)
                arrived(*of)

            super().__init__(*given, arrived=again, **named)

    monkeypatch.setattr("hapi.client.loading.prefetcher.Fetcher", Twice)
    batches = batches_of(24, 12)
    window, _ = make_window([FakeServer(4)], batches)
    try:
        with pytest.raises(HapiError, match="a sample arrived twice"):
            check_all(window, batches)
    finally:
        window.close()


def broken(ids: np.ndarray) -> np.ndarray:
    """Features of which those of sample 17 hold one that is no number."""
    features = features_of(ids).copy()
    features[ids == 17, 1, 0] = np.nan
    return features


def test_features_that_are_no_numbers_name_sample_and_server() -> None:
    server = FakeServer()
    server.features = broken
    window, _ = make_window([server], batches_of(40, 10))
    with pytest.raises(
        WireError, match=r"fake:0: features of split 2 are infinite or no numbers, of sample 17: .*off"
    ):
        list(window)
    window.close()


def test_features_that_are_no_numbers_are_asked_for_elsewhere() -> None:
    wrong, right = FakeServer(), FakeServer()
    wrong.features = broken
    batches = batches_of(40, 10)
    window, _ = make_window([wrong, right], batches)
    check_all(window, batches)
    window.close()


def test_features_that_are_no_numbers_may_be_allowed() -> None:
    server = FakeServer()
    server.features = broken
    window, _ = make_window([server], batches_of(40, 10), check=False)
    assert sum(int(torch.isnan(batch.fetched.features).sum()) for batch in window) == 1
    window.close()


def wait_until_asked(server: FakeServer, count: int) -> None:
    """And a little longer, for what should not be asked."""
    deadline = time.monotonic() + 240
    while len(server.asked) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)


def test_one_batch_is_prefetched_even_without_a_budget() -> None:
    server = FakeServer()
    batches = batches_of(60, 10)
    window, _ = make_window([server], batches, budget=0)
    arriving = iter(window)
    next(arriving)
    wait_until_asked(server, 20)
    assert len(server.asked) == 20  # the consumer's batch and the one ahead, no more
    window.close()


def test_budget_bounds_what_is_received_ahead() -> None:
    server = FakeServer()
    batch_bytes = 10 * 6 * 4
    window, _ = make_window([server], batches_of(200, 10), budget=5 * batch_bytes, in_flight=8)
    arriving = iter(window)
    next(arriving)
    wait_until_asked(server, 50)
    assert len(server.asked) == 50
    window.close()


@pytest.mark.parametrize(
    "fault",
    ["cut", StoreError("the store hiccuped"), TransportError("gone"), BusyError("full", retry_after=0.01)],
    ids=["cut", "store", "transport", "busy"],
)
def test_broken_requests_go_on_where_they_were(fault: HapiError | str) -> None:
    server = FakeServer(cos_batch=2)
    server.fault = lambda request, frame: fault if request % 3 == 1 and frame == 2 else None
    batches = batches_of(64, 16)
    window, pool = make_window([server], batches)
    check_all(window, batches)
    assert pool.retries > 0
    again = len(server.asked) - 64
    assert (
        again == sum(4 for n in range(1, server.requests + 1) if n % 3 == 1 and n <= 8 + pool.retries)
        or again < 64
    )
    window.close()


def test_flipped_bit_is_asked_for_again() -> None:
    server = FakeServer()
    damaged = threading.Event()

    def flip(stream: bytes) -> bytes:
        with server.lock:  # several answers may be made at once
            if damaged.is_set():
                return stream
            damaged.set()
        changed = bytearray(stream)
        changed[-20] ^= 4
        return bytes(changed)

    server.tamper = flip
    batches = batches_of(32, 16)
    window, pool = make_window([server], batches)
    check_all(window, batches)
    assert pool.retries == 1
    window.close()


def test_damage_that_stays_is_reported_not_retried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FAULT_PAUSE", 0.05)
    server = FakeServer()
    server.tamper = lambda stream: stream[:-20] + bytes([stream[-20] ^ 1]) + stream[-19:]
    window, _ = make_window([server], batches_of(16, 16))
    with pytest.raises(WireError, match=r"checksum|padding"):
        next(iter(window))
    window.close()


def test_errors_that_do_not_pass_reach_the_consumer_at_once() -> None:
    server = FakeServer()
    server.fault = lambda request, frame: DataError("sample 3 is damaged") if frame == 1 else None
    window, _ = make_window([server], batches_of(64, 16))
    with pytest.raises(DataError, match="sample 3"):
        list(window)
    window.close()


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError("of numpy")]
)
def test_batches_beyond_this_machines_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(BufferPool, "tensor", full)
    window, _ = make_window([FakeServer()], batches_of(20, 10))
    with pytest.raises(DeviceMemoryError, match=r"hold training batches of 10 samples .*--bs"):
        next(iter(window))
    window.close()


def test_a_dead_server_is_left_for_the_other() -> None:
    dead, well = FakeServer(), FakeServer()
    dead.fault = lambda request, frame: TransportError("connection refused")
    batches = batches_of(200, 20)
    window, _ = make_window([dead, well], batches)
    check_all(window, batches)
    assert dead.requests < 20
    window.close()


def test_patience_ends() -> None:
    server = FakeServer()
    server.fault = lambda request, frame: TransportError("connection refused")
    window, _ = make_window([server], batches_of(16, 16), patience=0.5)
    with pytest.raises(TransportError, match="refused"):
        next(iter(window))
    window.close()


def test_other_samples_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FAULT_PAUSE", 0.05)

    class Liar(FakeServer):
        def _frames(self, number: int, ids: np.ndarray):  # type: ignore[no-untyped-def]
            return super()._frames(number, ids[::-1])

    window, _ = make_window([Liar()], batches_of(16, 16))
    with pytest.raises(WireError, match="other samples"):
        next(iter(window))
    window.close()


def test_close_in_the_middle_ends_all_threads() -> None:
    before = threading.active_count()
    server = FakeServer(delay=0.01)
    window, pool = make_window([server], batches_of(500, 20))
    next(iter(window))
    pool.close()
    window.close()
    assert threading.active_count() <= before


def test_traffic_is_counted() -> None:
    server = FakeServer(cos_batch=16)
    batches = batches_of(32, 16)
    window, _ = make_window([server], batches, request_size=16)
    check_all(window, batches)
    assert window.loading.traffic.requests == 2
    assert window.loading.traffic.bytes_received > 32 * 24
    assert window.loading.traffic.server_seconds() == pytest.approx(1.0)
    assert window.loading.traffic.stages()["forward"] == pytest.approx(0.02)
    window.close()


def test_close_does_not_wait_for_the_rest_of_long_answers() -> None:
    server = FakeServer(cos_batch=1, delay=2.0)
    window, _ = make_window([server], batches_of(400, 200), request_size=200)
    time.sleep(0.2)
    started = time.monotonic()
    window.close()
    assert time.monotonic() - started < 60, "the rest takes three times as long"


@pytest.mark.parametrize("times", [1, 2])
def test_close_after_an_interrupt_that_left_the_lock_taken(times: int) -> None:
    """A signal's KeyboardInterrupt may come between taking the lock and the with block that gives it back."""
    window, _ = make_window([FakeServer(delay=0.01)], batches_of(200, 20))
    next(iter(window))
    for _ in range(times):
        window._changed.acquire()
    started = time.monotonic()
    window.close()
    assert time.monotonic() - started < 60
    assert not any(thread.is_alive() for thread in window._threads)


def test_a_closed_pool_reaches_the_consumer() -> None:
    """Who goes on with an epoch after the session was closed must not wait for ever."""
    server = FakeServer(delay=0.01)
    # Without a budget little is ahead: the rest cannot all be there before the pool is closed.
    window, pool = make_window([server], batches_of(500, 20), budget=0)
    arriving = iter(window)
    next(arriving)
    pool.close()
    with pytest.raises(HapiError, match="session was closed"):
        for _ in arriving:
            pass
    window.close()


def test_close_does_not_wait_for_a_resting_server() -> None:
    server = FakeServer()
    server.fault = lambda request, frame: BusyError("full", retry_after=50)
    window, _ = make_window([server], batches_of(20, 10), patience=300)
    while not server.requests:
        time.sleep(0.005)
    started = time.monotonic()
    window.close()
    assert time.monotonic() - started < 40
