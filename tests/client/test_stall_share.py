"""The share of its time in which a training loop waits, as its requests tell it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.client.loading.stall_share import ENOUGH_SECONDS, FORGETTING_SECONDS, StallShare
from hapi.wire.messages import STALL_HEADER, stall_of


class Loop:
    """A training loop with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stall = StallShare(lambda: self.now)

    def batches(self, count: int, waits: float, works: float) -> None:
        for _ in range(count):
            self.stall.waits()
            self.now += waits
            self.stall.goes_on()
            self.now += works


def test_it_is_the_share_of_the_waits() -> None:
    loop = Loop()
    loop.stall.goes_on()
    loop.batches(400, waits=0.1, works=0.3)
    assert loop.stall.share() == pytest.approx(0.25, abs=0.02)
    assert stall_of(loop.stall.headers()[STALL_HEADER]) == pytest.approx(0.25, abs=0.02)


def test_the_first_batch_of_a_pass_and_what_lies_between_passes_are_left_out() -> None:
    loop = Loop()
    for _ in range(10):
        loop.now += 60.0
        loop.stall.goes_on()
        loop.batches(10, waits=0.0, works=0.5)
        loop.stall.end()
    assert loop.stall.share() == 0.0


def test_nothing_is_told_before_enough_is_known() -> None:
    loop = Loop()
    loop.stall.goes_on()
    loop.now += 0.5 * ENOUGH_SECONDS
    assert loop.stall.share() is None and loop.stall.headers() == {}
    loop.now += 0.7 * ENOUGH_SECONDS
    assert loop.stall.share() == 0.0


def test_a_wait_that_lasts_counts_before_it_is_over() -> None:
    loop = Loop()
    loop.stall.goes_on()
    loop.batches(100, waits=0.0, works=0.5)
    loop.stall.waits()
    loop.now += FORGETTING_SECONDS
    assert loop.stall.share() == pytest.approx(1 - math.exp(-1), abs=0.01)
    loop.now += 1e9
    assert loop.stall.share() == 1.0


def test_long_batches_are_measured_over_several() -> None:
    loop = Loop()
    loop.stall.goes_on()
    for _ in range(40):
        loop.batches(1, waits=60.0, works=60.0)
        early = loop.stall.share()
    loop.stall.waits()
    loop.now += 60.0
    late = loop.stall.share()
    assert early is not None and late is not None and 0.3 < early < 0.5 < late < 0.7


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))))
def test_it_is_a_share_whatever_happens(steps: list[tuple[float, float]]) -> None:
    loop = Loop()
    loop.stall.goes_on()
    for waits, works in steps:
        loop.batches(1, waits, works)
        share = loop.stall.share()
        assert share is None or 0.0 <= share <= 1.0
        assert stall_of(loop.stall.headers().get(STALL_HEADER)) == pytest.approx(share, abs=1e-3)
