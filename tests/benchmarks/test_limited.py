"""The rate limiter: its arithmetic with a clock of its own, and a session whose frames pass through it."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.local_job import settings_of

from benchmarks.testbed.limited import BURST_SECONDS, PIECE_SECONDS, LimitedTransport, RateLimit
from hapi.client.session import Session
from hapi.errors import UsageError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.transport.http import LoopbackTransport


class Clock:
    """Time that passes only while someone sleeps, and then a little longer than asked; threads sleep side by side."""

    def __init__(self, lateness: float = 0.0) -> None:
        self.now = 100.0
        self.lateness = lateness
        self._seen = threading.local()

    def __call__(self) -> float:
        self._seen.at = self.now
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now = max(self.now, self._seen.at + seconds + self.lateness)


def limit_of(clock: Clock, bits: float | None) -> RateLimit:
    return RateLimit(bits, clock=clock, sleep=clock.sleep)


@given(
    bits=st.floats(1e4, 1e11),
    pieces=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50),
    lateness=st.floats(0, BURST_SECONDS / 2),
)
def test_bytes_pass_at_the_rate_and_lateness_does_not_add_up(
    bits: float, pieces: list[int], lateness: float
) -> None:
    clock = Clock(lateness)
    limit = limit_of(clock, bits)
    for piece in pieces:
        limit.take(piece)
    exact = sum(pieces) * 8 / bits
    assert exact - 1e-6 <= clock.now - 100.0 <= exact + lateness + 1e-6


def test_an_idle_link_saves_no_more_than_its_burst() -> None:
    clock = Clock()
    limit = limit_of(clock, 8000.0)  # 1000 bytes a second
    clock.now += 3600
    before = clock.now
    limit.take(1000)
    assert clock.now - before == pytest.approx(1.0 - BURST_SECONDS)
    limit.take(1000)
    assert clock.now - before == pytest.approx(2.0 - BURST_SECONDS)


def test_another_rate_counts_at_once_and_forgets_what_was_owed() -> None:
    clock = Clock()
    limit = limit_of(clock, 8000.0)
    limit.take(1000)
    limit.set_rate(80_000.0)
    limit.take(1000)
    assert clock.now == pytest.approx(101.1)
    limit.set_rate(None)
    limit.take(1 << 40)
    assert clock.now == pytest.approx(101.1)
    assert limit.bits_per_second is None


def test_pieces_are_short_in_time_whatever_the_rate() -> None:
    assert limit_of(Clock(), 8e6).part() == int(1e6 * PIECE_SECONDS)
    assert limit_of(Clock(), 1.0).part() == 1024
    assert limit_of(Clock(), None).part() > 1 << 40


@pytest.mark.parametrize("bits", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(bits: float) -> None:
    limit = RateLimit(1e6)
    for use in (RateLimit, limit.set_rate):
        with pytest.raises(UsageError, match=r"the link's rate is .* must be above 0"):
            use(bits)
    assert limit.bits_per_second == 1e6


def test_connections_share_the_rate() -> None:
    """Four threads that read at once get a fourth each, on a real clock."""
    limit = RateLimit(8e6)  # 1 MB a second
    taken = [0] * 4
    all_there, end = threading.Barrier(4), 0.0

    def read(number: int) -> None:
        nonlocal end
        all_there.wait(240)
        end = max(end, time.monotonic() + 0.6)
        while time.monotonic() < end:
            limit.take(limit.part())
            taken[number] += limit.part()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = (time.monotonic() - started + BURST_SECONDS) * 1e6
    # A loaded machine may sleep long, one thread longer than another, but never short.
    assert 0.1 * allowed < sum(taken) <= allowed * 1.001
    assert min(taken) > sum(taken) / 10


@pytest.mark.slow
def test_a_session_trains_through_it(service: Service) -> None:
    clock = Clock()
    limit = limit_of(clock, 1e6)
    settings = settings_of(split=4)
    transports = [LimitedTransport(LoopbackTransport(loopback_handler(service)), limit) for _ in range(2)]
    with Session.open(settings, transports=transports) as session:
        before = clock.now
        counts = [len(labels) for _, labels in session.epoch(0)]
        traffic = session.last.traffic
        assert counts == [10, 10, 10, 10, 6]
        seconds = traffic.bytes_received * 8 / 1e6
        # Every byte that was counted came at the rate, those of both servers together; end frames are few.
        assert seconds * 0.999 <= clock.now - before <= seconds * 1.05 + 0.1
        delivered = [transport.received_bytes() or 0 for transport in transports]
        assert all(delivered) and sum(delivered) == pytest.approx(traffic.bytes_received, rel=0.05)
