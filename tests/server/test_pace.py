"""When a reader of an answer loses its slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.server.http.slow_reader import DroppedReaderError, PaceLimits, SlowReaderGuard
from hapi.server.scheduling.fair_queue import FairQueue, Tenant

LIMITS = PaceLimits(silence=60.0, rate=1000, window=30.0)


class Reader:
    """A reader whose server does nothing but wait for it."""

    def __init__(self, limits: PaceLimits = LIMITS, *, deadline: float = 600.0, wanted: bool = True) -> None:
        self.wanted = wanted
        self.pace_limits = SlowReaderGuard(limits, deadline, lambda: self.wanted)
        self.now = self.taken = 0.0

    def takes(self, rate: float, seconds: float) -> None:
        """Take ``rate`` bytes a second, for some seconds."""
        end = self.now + seconds
        while self.now < end:
            since, self.now = self.now, min(end, self.now + self.pace_limits.interval)
            self.taken += rate * (self.now - since)
            if self.pace_limits.waited(since, self.now):
                self.pace_limits.check(self.now, int(self.taken))

    def computes(self, seconds: float) -> None:
        """The server does something else meanwhile."""
        self.now += seconds


def test_who_takes_enough_keeps_the_slot() -> None:
    Reader().takes(1100, 500)


def test_a_slow_one_keeps_it_while_nobody_wants_it() -> None:
    reader = Reader(wanted=False)
    reader.takes(1, 300)
    reader.wanted = True
    with pytest.raises(DroppedReaderError, match=r"took 3[01] bytes in 3[0-2] s while others wait") as caught:
        reader.takes(1, 0.6)
    assert caught.value.reason == "slow"


def test_what_buffers_swallow_at_first_does_not_count_for_long() -> None:
    reader = Reader()
    reader.takes(100_000_000, 0.5)
    with pytest.raises(DroppedReaderError, match="while others wait"):
        reader.takes(1, 36)
    assert 30 <= reader.now <= 33


def test_no_rate_at_all() -> None:
    Reader(PaceLimits(silence=60.0, rate=0, window=30.0)).takes(1, 500)


def test_silence() -> None:
    reader = Reader(wanted=False)
    reader.takes(5000, 50)
    with pytest.raises(DroppedReaderError, match="nothing for 60 s") as caught:
        reader.takes(0, 61)
    assert caught.value.reason == "silent"


def test_the_deadline() -> None:
    reader = Reader(deadline=100.0)
    with pytest.raises(DroppedReaderError, match="too long") as caught:
        reader.takes(5000, 101)
    assert caught.value.reason == "late"
    assert reader.now <= 100.5


def test_the_servers_own_time_is_not_the_readers() -> None:
    """It has taken all there is, and then the server computes for minutes."""
    reader = Reader()
    for _ in range(3):
        reader.takes(0, 20)
        reader.computes(150)
        reader.taken += 60_000
        reader.takes(0, 5)


@given(rates=st.lists(st.floats(0, 5000), min_size=3, max_size=12), seed=st.integers(0, 29))
def test_a_drop_is_always_deserved(rates: list[float], seed: int) -> None:
    """Whoever is dropped as slow took less than the rate over a window; who takes the double always is not."""
    reader = Reader(PaceLimits(silence=1e6, rate=1000, window=30.0), deadline=1e6)
    history: list[tuple[float, float]] = []
    try:
        for rate, seconds in [(2000.0, seed), *((rate, 12) for rate in rates)]:
            for _ in range(seconds):
                history.append((reader.now, reader.taken))
                reader.takes(rate, 1)
    except DroppedReaderError as error:
        assert error.reason == "slow"
        taken = [reader.taken - before for since, before in history if 29 <= reader.now - since <= 34]
        assert min(taken) < 1000 * 34
    else:
        if all(rate >= 2000 for rate in rates):
            assert reader.taken >= 2000 * (reader.now - 1)


def test_a_slot_is_wanted_by_who_could_use_it() -> None:
    limited, free = Tenant(name="limited", in_flight=1), Tenant(name="free")
    queue = FairQueue(1, 10)
    queue.enter(limited, 1.0)
    running = queue.next(0.0)
    assert running is not None
    queue.enter(limited, 1.0)
    assert not queue.pressed(0.0)  # it waits for its own limit
    waiting = queue.enter(free, 1.0)
    assert queue.pressed(0.0)
    queue.leave(waiting)
    queue.finish(running, 1.0, 1.0)
    assert not queue.pressed(1.0)  # a slot is free
