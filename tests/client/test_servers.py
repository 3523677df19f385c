"""The pool of servers: which one is asked, how long it is left alone, when a request is given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.client.transport import server_pool as servers_module
from hapi.client.transport import trouble as trouble_module
from hapi.client.transport.hedging import Measured
from hapi.client.transport.server_pool import MAX_FAULTS, ServerPool, Stopped
from hapi.errors import (
    BusyError,
    ConflictError,
    DeadlineError,
    DrainingError,
    ForeignAnswerError,
    HapiError,
    NotFoundError,
    StoreError,
    TransportError,
    WireError,
)
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import LoopbackTransport


def make_pool(count: int, patience: float = 200.0) -> ServerPool:
    return ServerPool(
        [LoopbackTransport(lambda *_: (200, {}, iter([b"{}"])), str(i)) for i in range(count)],
        retry_timeout=patience,
    )


class Attempts:
    """An attempt that fails with what ``plan`` says for its server and number."""

    def __init__(self, plan: Callable[[str, int], HapiError | None]) -> None:
        self.plan = plan
        self.asked: list[str] = []
        self.times: list[float] = []

    def __call__(self, transport: Transport) -> str:
        self.asked.append(transport.url)
        self.times.append(time.monotonic())
        error = self.plan(transport.url, len(self.asked))
        if error is not None:
            raise error
        return transport.url


def until(number: int, error: HapiError) -> Attempts:
    """Fails before the attempt of this number."""
    return Attempts(lambda url, n: error if n < number else None)


def pauses(monkeypatch: pytest.MonkeyPatch, first: float, fault: float = 0.5) -> None:
    """Shorter ones than a person would want, where only their course matters."""
    monkeypatch.setattr(servers_module, "FIRST_PAUSE", first)
    monkeypatch.setattr(servers_module, "FAULT_PAUSE", fault)


class Clock:
    """The pool's: the real one, and the seconds that attempts say they took, which nobody has to wait for."""

    def __init__(self) -> None:
        self.took = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.took


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(servers_module, "time", made)
    return made


def test_a_pool_needs_a_server() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ServerPool([])


def test_the_least_busy_server_is_asked() -> None:
    pool = make_pool(3)
    inside: list[str] = []

    def nested(transport: Transport) -> None:
        inside.append(transport.url)
        if len(inside) < 6:
            pool.run(nested)

    pool.run(nested)
    assert sorted(inside[:3]) == sorted(inside[3:]) == ["0", "1", "2"]


def test_a_slow_server_is_asked_less(clock: Clock) -> None:
    """The first takes ten times as long as the second for features; for other requests that is not known."""
    pool, asked = make_pool(2), list[str]()

    def attempt(transport: Transport) -> None:
        asked.append(transport.url)
        clock.took += 10.0 if transport.url == "0" else 1.0

    for _ in range(20):
        pool.run(attempt, measured=Measured(kind=4, samples=lambda: 8))
    assert asked == ["0", *["1"] * 19]
    pool.run(attempt)
    assert asked[-1] == "0"


def test_a_failed_attempt_tells_no_speed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, 0.001)
    pool = make_pool(1)

    def plan(url: str, number: int) -> HapiError | None:
        clock.took += 100.0 if number == 1 else 1.0
        return BusyError("full") if number == 1 else None

    pool.run(Attempts(plan), measured=Measured(kind=4, samples=lambda: 1))
    assert pool._servers[0].sample_seconds(4) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize(
    "error",
    [
        TransportError("x"),
        BusyError("x"),
        DeadlineError("x"),
        DrainingError("x"),
        StoreError("x"),
        WireError("x"),
    ],
)
def test_what_may_pass_is_tried_again(error: HapiError) -> None:
    pool = make_pool(1)
    attempts = until(3, error)
    assert pool.run(attempts) == "0"
    assert (len(attempts.asked), pool.retries) == (3, 2)


@pytest.mark.parametrize("error", [NotFoundError("x"), ConflictError("x"), HapiError("x")])
def test_what_does_not_pass_is_not(error: HapiError) -> None:
    pool = make_pool(2)
    attempts = until(9, error)
    with pytest.raises(type(error)):
        pool.run(attempts)
    assert (len(attempts.asked), pool.retries) == (1, 0)


def test_of_several_servers_the_one_that_fails_is_named() -> None:
    """Its store may be another one."""
    for count, said in ((1, "no such dataset"), (2, "1: no such dataset")):
        attempts = Attempts(lambda url, n: NotFoundError("no such dataset"))
        with pytest.raises(NotFoundError, match=f"^{said}$"):
            make_pool(count).run(attempts, only=str(count - 1))
    named = Attempts(lambda url, n: NotFoundError(f"{url}/v1: no such dataset"))
    with pytest.raises(NotFoundError, match=r"^[01]/v1: no such dataset$"):
        make_pool(2).run(named)


def test_foreign_answers_are_the_servers_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Another one is asked, once, and a person is told of the first; where there is no other that is the end."""
    attempts = Attempts(lambda url, n: ForeignAnswerError(f"{url}: answered 404") if url < "2" else None)
    pool = make_pool(3)
    for _ in range(5):
        assert pool.run(attempts) == "2"
    assert 2 <= pool.retries <= 5, "they are left alone for a while"
    assert sorted(caplog.messages) == [f"{n}: answered 404; another server is asked" for n in (0, 1)]
    attempts = until(9, ForeignAnswerError("x"))
    with pytest.raises(ForeignAnswerError):
        make_pool(3).run(attempts)
    assert sorted(attempts.asked) == ["0", "1", "2"]


def test_another_server_is_tried_before_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, 60.0)
    pool = make_pool(3)
    attempts = until(3, TransportError("gone"))
    started = time.monotonic()
    pool.run(attempts)
    assert len(set(attempts.asked)) == 3
    assert time.monotonic() - started < 30, "without a pause"


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, 0.04)
    pool = make_pool(1)
    attempts = until(5, TransportError("gone"))
    pool.run(attempts)
    gaps = [b - a for a, b in zip(attempts.times, attempts.times[1:], strict=False)]
    assert all(0.028 * 2**i < gap < 0.12 * 2**i + 60 for i, gap in enumerate(gaps))


def test_retry_after_is_kept() -> None:
    pool = make_pool(1)
    attempts = until(2, BusyError("full", retry_after=0.6))
    pool.run(attempts)
    assert 0.44 < attempts.times[1] - attempts.times[0] < 60


@pytest.mark.parametrize("retry_after", [float("nan"), float("inf"), -5.0, 1e300])
def test_odd_retry_after_does_no_harm(retry_after: float) -> None:
    pool = make_pool(1, patience=0.5)
    with pytest.raises(BusyError):
        pool.run(until(99, BusyError("full", retry_after=retry_after)))


@settings(max_examples=12)
@given(
    st.integers(1, 3),
    st.floats(0, 0.3),
    st.sampled_from([TransportError("x"), BusyError("x", retry_after=60)]),
)
def test_patience_bounds_the_wait(count: int, patience: float, error: HapiError) -> None:
    attempts = until(10**9, error)
    started = time.monotonic()
    with pytest.raises(type(error)):
        make_pool(count, patience).run(attempts)
    assert time.monotonic() - started < patience + 30
    assert len(set(attempts.asked)) == count


def test_patience_counts_from_the_first_failure(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A request that took long and broke has its whole patience before it."""
    pauses(monkeypatch, 0.02)
    pool = make_pool(1, patience=20)

    def plan(url: str, number: int) -> HapiError | None:
        if number == 1:
            clock.took += 30
        return TransportError("broke") if number < 3 else None

    assert pool.run(Attempts(plan)) == "0"


@pytest.mark.parametrize("kind", [BusyError, DeadlineError, TransportError])
def test_patience_lasts_while_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, kind: type[HapiError]
) -> None:
    """One that is sent away again and again does not end a job that moves; one that nobody ever answers does."""
    pauses(monkeypatch, 0.01)
    pool = make_pool(1, patience=10)

    def plan(url: str, number: int) -> HapiError | None:
        pool._servers[0].failures = 0
        clock.took += 1
        if number < 40:
            assert pool.run(lambda transport: "other") == "other"
        return kind("x") if number < 40 else None

    started = clock.monotonic()
    assert pool.run(Attempts(plan)) == "0"
    assert clock.monotonic() - started > 2 * 10
    monkeypatch.setattr(servers_module, "MAX_RETRY_FACTOR", 1)
    with pytest.raises(kind):
        pool.run(Attempts(plan))


def test_progress_begins_patience_and_faults_anew(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    pauses(monkeypatch, 0.03, 0.05)
    pool = make_pool(1, patience=5)
    attempts = until(11, TransportError("broke"))
    pool._servers[0].failures = 0

    def attempt(transport: Transport) -> str:
        pool._servers[0].failures = 0  # the pauses stay short, only patience is measured
        clock.took += 1
        return attempts(transport)

    assert pool.run(attempt, progress=lambda: len(attempts.asked)) == "0"
    faulty = until(MAX_FAULTS * 2, WireError("flipped"))
    assert make_pool(1).run(faulty, progress=lambda: len(faulty.asked)) == "0"


def test_damaged_answers_end_after_some(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, 0.02, 0.05)
    attempts = until(99, WireError("flipped"))
    with pytest.raises(WireError):
        make_pool(1).run(attempts)
    assert len(attempts.asked) == MAX_FAULTS


def test_damaged_answers_count_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server that is busy for long, or drops who is slow, a store that fails now and then ends nobody's job."""
    pauses(monkeypatch, 0.01, 0.01)
    monkeypatch.setattr(servers_module, "LONGEST_PAUSE", 0.02)
    course: list[HapiError] = [*([StoreError("failed")] * (MAX_FAULTS - 1)), BusyError("full")]
    attempts = Attempts(lambda url, n: course[(n - 1) % len(course)] if n <= 3 * len(course) else None)
    assert make_pool(1).run(attempts) == "0"
    assert len(attempts.asked) == 3 * len(course) + 1


def test_a_server_that_recovers_is_well_at_once() -> None:
    pool = make_pool(1)
    pool.run(until(4, TransportError("gone")))
    attempts = until(2, TransportError("gone"))
    pool.run(attempts)
    assert attempts.times[1] - attempts.times[0] < 0.55  # a fourth pause in a row takes 0.6 at least


@pytest.mark.parametrize("by", ["close", "cancel"])
def test_waiting_requests_can_be_stopped(by: str) -> None:
    pool = make_pool(1, patience=300)
    cancel = threading.Event()
    attempts = until(99, BusyError("full", retry_after=50))
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            pool.run(attempts, cancelled=cancel.is_set)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not attempts.asked:
        time.sleep(0.005)
    pool.close() if by == "close" else cancel.set()
    thread.join(40)  # its pause would be 50 s
    assert isinstance(outcome[0], Stopped)


def test_errors_after_close_are_not_the_callers() -> None:
    pool = make_pool(1)

    def attempt(transport: Transport) -> None:
        pool.close()
        raise TransportError("the connection was broken")

    with pytest.raises(Stopped):
        pool.run(attempt)


def test_what_was_broken_off_is_no_failure_of_a_server() -> None:
    """As at the end of a pass that is left in its middle: the next one asks the server at once."""
    pool, unwanted = make_pool(1), threading.Event()

    def attempt(transport: Transport) -> None:
        unwanted.set()
        raise TransportError("the connection was broken")

    with pytest.raises(Stopped):
        pool.run(attempt, cancelled=unwanted.is_set)
    assert (pool.retries, pool._servers[0].failures, pool._servers[0].well_at) == (0, 0, 0.0)


def test_a_long_outage_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses(monkeypatch, 0.03)
    monkeypatch.setattr(trouble_module, "OUTAGE_SECONDS", 0.06)
    pool = make_pool(1, patience=300)
    with caplog.at_level(logging.WARNING, "hapi.client"):
        pool.run(until(5, TransportError("refused by http://x")))
        assert [r.getMessage() for r in caplog.records] == [
            "no request gets through (refused by http://x); trying for up to 300 s"
        ]
        monkeypatch.setattr(trouble_module, "OUTAGE_SECONDS", 3600.0)
        pool.run(until(2, TransportError("a blip")))
        assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", [BusyError, DeadlineError])
def test_being_sent_away_for_long_is_told_once_a_minute(
    kind: type[HapiError], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowded server takes some requests and refuses others: answers in between are no end of it."""
    pauses(monkeypatch, 0.04)
    monkeypatch.setattr(trouble_module, "OUTAGE_SECONDS", 0.02)
    pool = make_pool(1, patience=300)
    with caplog.at_level(logging.WARNING, "hapi.client"):
        for _ in range(4):
            pool.run(until(3, kind("4 requests run and 128 wait", retry_after=0.04)))
        assert [r.getMessage() for r in caplog.records] == [
            (
                "the server is too busy and sends requests away (4 requests run and 128 wait); next try in 0 s, "
                "giving up after 300 s"
            )
        ]
        monkeypatch.setattr(trouble_module, "BUSY_SECONDS", 0.0)
        pool.run(until(3, kind("still", retry_after=0.04)))
        assert len(caplog.records) > 1


def test_defects_do_not_leave_a_server_marked_busy() -> None:
    pool = make_pool(2)

    def defect(transport: Transport) -> None:
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            pool.run(defect)
    assert [s.in_flight for s in pool._servers] == [0, 0]
