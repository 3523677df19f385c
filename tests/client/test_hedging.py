"""Requests that are sent to a second server: one answer counts, whichever comes first, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_server import FakeServer
from test_window import JOB, batches_of, check_all

from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.prefetcher import Prefetcher
from hapi.client.loading.receiver import OpenBatch, RequestSlice
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.transport.hedging import InFlight, Measured, Server
from hapi.client.transport.server_pool import ServerPool, Stopped
from hapi.client.transport.stragglers import ENOUGH_ANSWERS
from hapi.errors import TransportError
from hapi.trace import Tracer
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation
from hapi.wire.transport.http import LoopbackTransport

LONG = 240.0
"""Seconds after which a test gives up."""


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def pool() -> Iterator[ServerPool]:
    """Two servers, which are known to be quick."""
    made = ServerPool([LoopbackTransport(lambda *_: (200, {}, iter([b"{}"])), str(i)) for i in range(2)])
    for _ in range(2 * ENOUGH_ANSWERS):
        made.run(lambda transport: time.sleep(0.001), measured=asked(None))
    yield made
    made.close()


def asked(second: Callable[[Transport, Cancellation], Callable[[], Any]] | None) -> Measured:
    return Measured(kind=1, samples=lambda: 8, second=second)


class Hung:
    """A first server that hangs until its request is cancelled, or ``ends``."""

    def __init__(self, second: Callable[[Transport, Cancellation], Callable[[], Any]]) -> None:
        self.measured = asked(second)
        self.servers: list[str] = []
        self.ends = threading.Event()

    def __call__(self, transport: Transport) -> str:
        self.servers.append(transport.url)
        until(lambda: self.measured.cancellation.cancelled or self.ends.is_set())
        self.measured.cancellation.check()
        return "first"


def test_the_second_answer_is_taken_once_the_first_is_broken(pool: ServerPool) -> None:
    places: list[str] = []

    def second(transport: Transport, cancellation: Cancellation) -> Callable[[], str]:
        places.append(transport.url)
        return lambda: f"second in {threading.current_thread().name}"

    hung = Hung(second)
    assert pool.run(hung, measured=hung.measured) == f"second in {threading.current_thread().name}"
    assert hung.servers != places and len(hung.servers) == len(places) == 1
    assert pool.retries == 0 and all(s.failures == s.in_flight == 0 for s in pool._servers)
    slow = pool._servers[int(hung.servers[0])].sample_seconds(1)
    quick = pool._servers[int(places[0])].sample_seconds(1)
    assert slow is not None and quick is not None and slow > quick


def test_the_first_answer_breaks_the_second(pool: ServerPool) -> None:
    broken = threading.Event()

    def second(transport: Transport, cancellation: Cancellation) -> Callable[[], str]:
        hung.ends.set()
        until(lambda: cancellation.cancelled)
        broken.set()
        raise TransportError("broken")

    hung = Hung(second)
    assert pool.run(hung, measured=hung.measured) == "first"
    assert broken.wait(LONG)
    until(lambda: all(s.failures == s.in_flight == 0 for s in pool._servers))


def test_an_answer_that_comes_when_the_first_attempt_is_over_breaks_nothing() -> None:
    """The request may be under way again by then, with the same cancellation."""
    measured, server = (
        asked(None),
        Server(transport=LoopbackTransport(lambda *_: (200, {}, iter([]))), name="0"),
    )
    request = InFlight(server, measured, server.asked(1, 8, 0.0), measured.cancellation, 0.0)
    assert request.end() is None
    request.win(lambda: "late")
    assert request.end() is None and not measured.cancellation.cancelled


def test_a_second_request_that_fails_is_no_ones_loss(pool: ServerPool) -> None:
    failed = threading.Event()

    def second(transport: Transport, cancellation: Cancellation) -> Callable[[], str]:
        failed.set()
        raise TransportError("refused")

    hung = Hung(second)
    threading.Thread(target=lambda: failed.wait(LONG) and hung.ends.set()).start()
    assert pool.run(hung, measured=hung.measured) == "first"
    until(lambda: sorted(s.failures for s in pool._servers) == [0, 1])


def test_a_second_request_for_which_there_is_no_thread(
    pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if thread.name == "hapi-second":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    hung = Hung(lambda *_: lambda: "second")
    threading.Thread(target=lambda: refused.wait(LONG) and hung.ends.set()).start()
    assert pool.run(hung, measured=hung.measured) == "first"
    assert [server.in_flight for server in pool._servers] == [0, 0]
    watching = pool._hedging._thread
    assert watching is not None and watching.is_alive(), "others may still get one"


def test_the_first_server_s_failure_is_tried_elsewhere(pool: ServerPool) -> None:
    begun, tried = threading.Event(), list[str]()

    def second(transport: Transport, cancellation: Cancellation) -> Callable[[], str]:
        begun.set()
        until(lambda: cancellation.cancelled)
        raise TransportError("broken")

    def attempt(transport: Transport) -> str:
        tried.append(transport.url)
        if len(tried) == 1:
            assert begun.wait(LONG)
            raise TransportError("gone")
        return transport.url

    assert pool.run(attempt, measured=asked(second)) == tried[1] != tried[0]
    assert pool.retries == 1


def test_closing_ends_both(pool: ServerPool) -> None:
    ended = threading.Event()

    def second(transport: Transport, cancellation: Cancellation) -> Callable[[], str]:
        pool.close()
        hung.measured.cancellation.cancel()
        until(lambda: cancellation.cancelled)
        ended.set()
        raise TransportError("closed")

    hung = Hung(second)
    with pytest.raises(Stopped):
        pool.run(hung, measured=hung.measured)
    assert ended.wait(LONG)


@pytest.mark.parametrize("how", ["one server", "named", "not idempotent"])
def test_what_is_never_asked_twice(pool: ServerPool, how: str) -> None:
    hung = Hung(lambda *_: pytest.fail("asked twice"))
    only = pool.urls[0] if how == "named" else None
    if how == "one server":
        pool.leave(pool.urls[0])
    if how == "not idempotent":
        hung.measured.second = None
    threading.Timer(0.3, hung.ends.set).start()
    assert pool.run(hung, measured=hung.measured, only=only) == "first"


# -- with batches ------------------------------------------------------------------------------------------------


class Straggler(FakeServer):
    """Hangs in one request before the frame ``number``, when ``known`` says so, until the client has left it."""

    def __init__(self, number: int, known: Callable[[], bool]) -> None:
        super().__init__(cos_batch=2)
        self.hung, self.left = threading.Event(), threading.Event()

        def fault(found: int, frame: int) -> None:
            if frame == number and known() and not self.hung.is_set():
                self.hung.set()
                assert self.left.wait(LONG)

        self.fault = fault


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("frame", [0, 3])
def test_a_batch_with_a_straggler_is_right_and_counted(frame: int) -> None:
    """Of the straggler's frames those that came before count once, and the second answer's others."""
    batches, other = batches_of(64 * ENOUGH_ANSWERS, 32), FakeServer(cos_batch=2)
    slow = Straggler(frame, lambda: slow.requests + other.requests > 2 * ENOUGH_ANSWERS)
    servers = [slow, other]
    transports = [LoopbackTransport(server, f"fake:{i}") for i, server in enumerate(servers)]
    pool, traffic, buffers = ServerPool(transports), Traffic(), Released(slow.left)
    loading = PassLoading(
        servers=pool,
        traffic=traffic,
        buffers=buffers,
        tracer=Tracer(enabled=False),
        codecs=WireCodecs("none"),
        request_size=8,
        in_flight=4,
        budget=1 << 20,
    )
    window = Prefetcher(lambda number: JOB, batches, loading)
    check_all(window, batches)
    window.close()
    pool.close()
    asked, used = sum(len(s.asked) for s in servers), sum(map(len, batches))
    assert slow.hung.is_set() and traffic.extra_requests >= 1
    assert traffic.splits[2].requests == used // 8
    assert asked - used <= 8 * traffic.extra_requests
    assert pool.retries == 0


class Released(BufferPool):
    """Lets the straggler go on when a second request takes memory, and not before."""

    def __init__(self, left: threading.Event) -> None:
        super().__init__()
        self._left = left

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if shape[0] <= 8:
            threading.Timer(0.2, self._left.set).start()
        return super().tensor(shape, dtype)


def test_bytes_of_an_answer_that_is_not_used_are_extra() -> None:
    traffic = Traffic()
    arrival = traffic.arrival(2, "")
    arrival.begin()
    arrival.end(100, extra=True)
    traffic.extra(0, 1)
    assert (traffic.extra_requests, traffic.extra_bytes, traffic.bytes_received) == (1, 100, 0)
    traffic.extra(-60)
    traffic.received(2, 60, 0.0)
    assert (traffic.extra_bytes, traffic.bytes_received, traffic.requests) == (40, 60, 0)


def test_order_of_ids_is_kept_when_rows_are_taken() -> None:
    """A second answer that began when two rows were there is taken when five are: only the others are copied."""
    ids = np.arange(10, 26)
    batch = OpenBatch(
        0, JOB, ids, torch.zeros(16, 3, 2), torch.zeros(16, dtype=torch.int64), np.zeros(16, bool), ids * 0
    )
    part = RequestSlice(batch, np.arange(8, 16), next=2)
    other = part.for_second(BufferPool(), Cancellation())
    assert other.batch.ids.tolist() == list(range(20, 26))
    other.batch.features[:] = torch.arange(20, 26).reshape(6, 1, 1)
    other.batch.labels[:] = torch.arange(20, 26)
    part.next = 5
    assert part.take(other, "b").tolist() == [13, 14, 15]
    assert batch.labels.tolist() == [0] * 13 + [23, 24, 25] == batch.features[:, 0, 0].tolist()
    assert part.next == 8 and not len(part.take(other, "b"))
