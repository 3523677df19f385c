"""Pacing: one answer after the other where the link is scarce, as many as may be where it is not."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.client.loading.pacing import UNKNOWN, Learned, RequestPacer
from hapi.client.transport.link_meter import LinkMeter


class Link:
    """What a pacing asks of a link's meter."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rate: float | None = None

    def idle(self, width: int = 1) -> float:
        return self.seconds

    def width(self, servers: int) -> int:
        return servers

    def recent(self) -> float | None:
        return self.rate


class Simulation:
    """A server that works on one request at a time, and a link that its answers share evenly."""

    def __init__(self, *, rate: float, work: float, size: int, most: int, known: bool = True) -> None:
        self.rate, self.work, self.size, self.most = rate, work, size, most
        self.now, self.arrived, self.link = 0.0, 0.0, Link()
        self.link.rate = rate if known else None
        learned = Learned(self.link.rate)
        link: LinkMeter = self.link  # type: ignore[assignment]
        self.pacing = RequestPacer(lambda: int(self.arrived), link, learned, lambda: 1, lambda: self.now)
        self.order: list[int] = []
        self.ends: list[float] = []
        self.largest = 0

    def run(self, count: int) -> float:
        """Seconds for so many requests, sent by ``most`` threads that ask the pacing each time something happens."""
        queue: list[int] = []
        flows: dict[int, float] = {}
        worker: tuple[float, int] | None = None
        sent, last_payload, wake = 0, None, [0.0]
        while len(self.ends) < count:
            under_way = sent - len(self.ends)
            while sent < count and under_way < self.most:
                delay = self.pacing.delay(1)
                if delay:
                    heapq.heappush(wake, self.now + max(delay, 1e-5))
                    break
                self.pacing.sent(sent, self.size)
                queue.append(sent)
                sent, under_way = sent + 1, under_way + 1
                self.largest = max(self.largest, under_way)
            if worker is None and queue:
                worker = (self.now + self.work, queue.pop(0))
            ahead = [worker[0]] if worker else []
            if flows:
                ahead.append(self.now + min(flows.values()) * len(flows) / self.rate)
            while wake and wake[0] <= self.now:
                heapq.heappop(wake)
            until = min([*ahead, *wake[:1]])
            moved = (until - self.now) * self.rate
            if flows:
                self.arrived += moved
                flows = {number: left - moved / len(flows) for number, left in flows.items()}
                last_payload = until
            self.now = until
            if worker and worker[0] <= self.now:
                if not flows and last_payload is not None:
                    self.link.seconds += self.now - last_payload
                flows[worker[1]] = float(self.size)
                worker = None
            for number in [n for n, left in flows.items() if left <= 1e-6]:
                del flows[number]
                self.order.append(number)
                self.ends.append(self.now)
                self.link.rate = self.rate
                self.pacing.done(number, 1, self.size)
        return self.now


@pytest.mark.slow
@settings(max_examples=60)
@given(
    transfer=st.floats(0.001, 1.0),
    work=st.floats(0.0001, 1.0),
    most=st.integers(1, 8),
    known=st.booleans(),
)
def test_the_link_or_the_server_is_busy_and_answers_come_in_order(
    transfer: float, work: float, most: int, known: bool
) -> None:
    size = 100_000
    simulation = Simulation(rate=size / transfer, work=work, size=size, most=most, known=known)
    count = 60
    seconds = simulation.run(count)
    scarcest = max(transfer, work) if most > 1 else transfer + work
    # The first answers are what the lead is learned from.
    assert seconds <= 1.15 * count * scarcest + 10 * (transfer + work)
    assert sorted(simulation.order) == list(range(count))


def test_a_scarce_link_brings_one_answer_after_the_other() -> None:
    simulation = Simulation(rate=1e6, work=0.004, size=100_000, most=4)
    simulation.run(40)
    assert simulation.order == list(range(40)) and simulation.largest <= 2
    assert simulation.ends[2] < 0.35, "three answers make the first batch; four together would take 0.4 s"


def test_a_fast_link_has_as_many_under_way_as_may_be() -> None:
    simulation = Simulation(rate=1e9, work=0.05, size=100_000, most=4)
    simulation.run(40)
    assert simulation.largest == 4


def test_where_nobody_can_tell_there_is_no_pace() -> None:
    pacing = RequestPacer(lambda: None, LinkMeter(lambda: None), Learned(1000.0), lambda: 1)
    for number in range(10):
        assert pacing.delay(0) == 0
        pacing.sent(number, 1e9)


def test_a_rate_that_is_not_known_yet() -> None:
    pacing = RequestPacer(lambda: 0, LinkMeter(lambda: 0), Learned(), lambda: 1)
    for number in range(UNKNOWN):
        assert pacing.delay(0) == 0
        pacing.sent(number, 1000)
    assert pacing.delay(0) > 0
    pacing.done(0, 0, None)
    assert pacing.delay(0) == 0, "a request that failed is not under way"


def test_a_link_too_fast_to_be_seen_holds_nothing_back() -> None:
    """What it brings is there before anybody looks, so that its rate is never known."""
    learned = Learned()
    pacing = RequestPacer(lambda: 0, LinkMeter(lambda: 0), learned, lambda: 1)
    for number in range(UNKNOWN):
        pacing.sent(number, 1000)
    pacing.done(0, 0, 1000)
    for number in range(10, 20):
        assert pacing.delay(0) == 0
        pacing.sent(number, 1000)
    following = RequestPacer(lambda: 0, LinkMeter(lambda: 0), learned, lambda: 1)
    for number in range(10):
        assert following.delay(0) == 0, "nor does the next pass wait for its rate"
        following.sent(number, 1000)


def test_what_was_expected_wrongly_is_corrected() -> None:
    arrived, link = [0], Link()
    link.rate = 1000.0
    pacing = RequestPacer(lambda: arrived[0], link, Learned(1000.0), lambda: 1)  # type: ignore[arg-type]
    pacing.sent("a", 10)
    arrived[0] = 5000
    pacing.done("a", 0, 5000)
    pacing.sent("b", 2000)
    assert pacing.delay(0) == pytest.approx(2.0)
    pacing.sent("c", 2000)
    arrived[0] += 1000
    assert pacing.delay(0) == pytest.approx(3.0)
    arrived[0] += 9000
    assert pacing.delay(0) == 0.0


def test_a_silent_server_holds_nobody_back_for_long() -> None:
    now = [0.0]
    pacing = RequestPacer(lambda: 0, LinkMeter(lambda: 0), Learned(1000.0), lambda: 1, lambda: now[0])
    pacing.sent("silent", 500)
    assert pacing.delay(0) == pytest.approx(0.5)
    now[0] = 0.9
    assert pacing.delay(0) == pytest.approx(0.1)
    now[0] = 1.1
    assert pacing.delay(0) == 0
    pacing.sent("other", 500)
    assert pacing.delay(0) == pytest.approx(1.0), "the next one is held back anew"
