"""Pacing beside several servers, whose links are their own or one; one server is paced as ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.client.loading.pacing import (
    IDLE,
    LONGEST_LEAD,
    MAX_DELAY_FACTOR,
    UNKNOWN,
    Learned,
    RequestPacer,
)
from hapi.client.transport.link_meter import LinkMeter
from hapi.cluster.simulation.network import Network
from hapi.cluster.simulation.training.incoming import IncomingLink

SIZE = 1e6


class Fetching:
    """Servers that answer one request at a time, and a client that sends at the pacer's pace."""

    def __init__(self, links: list[float], shared: float, work: float, most: int) -> None:
        self.env = simpy.Environment()
        self.network = Network(self.env)
        self.shared = self.network.add_link(shared)
        self.links = [self.network.add_link(rate) for rate in links]
        self.slots = [simpy.Resource(self.env, 1) for _ in links]
        self.in_flight = [0] * len(links)
        self.work, self.most = work, most
        self.incoming = IncomingLink(self.env, self.network, len(links), self.send)
        self.left = self.sent = 0
        self.under_way: list[int] = []
        """Requests under way as each one is sent."""
        self.order: list[int] = []

    def run(self, count: int) -> float:
        """Seconds for so many requests."""
        self.left = count
        self.send()
        self.env.run()
        assert sorted(self.order) == list(range(count))
        return float(self.env.now)

    def send(self) -> None:
        while self.left and sum(self.in_flight) < self.most:
            if self.incoming.held_back(1):
                return
            server = min(range(len(self.in_flight)), key=self.in_flight.__getitem__)
            self.left -= 1
            self.in_flight[server] += 1
            self.under_way.append(sum(self.in_flight))
            self.incoming.pacer.sent(self.sent, SIZE)
            self.env.process(self.fetch(self.sent, server))
            self.sent += 1

    def fetch(self, number: int, server: int) -> Iterator[simpy.Event]:
        with self.slots[server].request() as slot:
            yield slot
            yield self.env.timeout(self.work)
        transfer = self.network.send((self.links[server], self.shared), SIZE)
        self.incoming.begins(transfer, f"server{server}")
        yield transfer.done
        self.incoming.ends(transfer)
        self.in_flight[server] -= 1
        self.order.append(number)
        self.incoming.pacer.done(number, 1, round(SIZE))
        self.send()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    transfers=st.lists(st.floats(0.1, 0.4), min_size=1, max_size=5),
    share=st.floats(0.2, 1.2),
    work=st.floats(0.001, 0.5),
)
def test_the_links_or_the_servers_are_busy(transfers: list[float], share: float, work: float) -> None:
    """Whatever is scarce: the servers' own links, the one that they share, or their work."""
    links, count = [SIZE / seconds for seconds in transfers], 30 * len(transfers)
    shared = share * sum(links)
    seconds = Fetching(links, shared, work, most=4 * len(links)).run(count)
    fastest = min(shared, sum(min(rate, SIZE / work) for rate in links))
    ends = 4 * (max(transfers) + work + SIZE / shared)
    assert seconds <= 1.25 * count * SIZE / fastest + ends


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_links_of_their_own_bring_what_they_can_together(servers: int) -> None:
    fetching = Fetching([SIZE / 0.2] * servers, 1e12, 0.01, most=4 * servers)
    seconds = fetching.run(40 * servers)
    assert seconds <= (1.1 * 40 + 3) * 0.2, "some answers tell how many links there are"
    assert max(fetching.under_way) < 4 * servers, "and no more requests than fill them"


def test_over_a_shared_link_answers_come_one_after_the_other() -> None:
    fetching = Fetching([SIZE / 0.2] * 4, SIZE / 0.2, 0.01, most=16)
    seconds = fetching.run(200)
    assert seconds <= 1.1 * 200 * 0.2
    usual = sorted(fetching.under_way)[150]
    assert usual <= 2, "at most times"


def test_while_requests_wait_for_slots_one_answer_is_enough() -> None:
    """Links of their own, but servers that have more to do than slots: more requests would wait there, too."""
    fetching = Fetching([SIZE / 0.2] * 4, 1e12, 0.01, most=16)
    fetching.run(80)
    pacer, learned = fetching.incoming.pacer, fetching.incoming._learned
    learned.lead.clear()
    for number in range(2):
        pacer.sent(number, SIZE)
    assert pacer.delay(1) == 0, "four fill the links"
    pacer.waits(0.1)
    assert pacer.delay(1) > 0
    pacer.waits(0.0)
    assert pacer.delay(1) == 0


class OneLink:
    """The rule for one link, as it was before there were several."""

    def __init__(self, link: Any, learned: Learned, arrived: Any, clock: Callable[[], float]) -> None:
        self.link, self.learned, self.arrived, self.clock = link, learned, arrived, clock
        self.coming: dict[object, float] = {}
        self.expected, self.before, self.held = 0.0, 0, False
        self.idle = link.idle()
        self.since: float | None = None

    def delay(self, split: int) -> float:
        if not self.coming:
            return 0.0
        if self.learned.rate is None:
            return 0.0 if self.learned.answered or len(self.coming) < UNKNOWN else 0.05
        whole, rate = sum(self.coming.values()), self.learned.rate
        to_come = min(whole, max(0.0, self.expected - (self.arrived() - self.before)))
        delay = max(0.0, to_come / rate - self.learned.lead[split])
        if delay:
            now = self.clock()
            self.since = now if self.since is None else self.since
            delay = min(delay, max(0.0, self.since + MAX_DELAY_FACTOR * whole / rate - now))
        self.held |= delay > 0
        return delay

    def sent(self, request: object, nbytes: float) -> None:
        if not self.coming:
            self.before, self.expected = self.arrived(), 0.0
        self.coming[request] = nbytes
        self.expected += nbytes
        self.since = None

    def done(self, request: object, split: int, nbytes: int) -> None:
        self.expected += nbytes - self.coming.pop(request)
        self.learned.rate, self.learned.answered = self.link.recent() or self.learned.rate, True
        idle, self.idle = self.link.idle() - self.idle, self.link.idle()
        if self.held and self.learned.rate is not None and idle > IDLE * nbytes / self.learned.rate:
            self.learned.lead[split] = min(LONGEST_LEAD, self.learned.lead[split] + idle)
        self.held = False


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(0, 300_000), st.sampled_from("sbed")), max_size=60
    )
)
def test_one_server_is_paced_as_ever(steps: list[tuple[float, int, str]]) -> None:
    now, arrived, number = 0.0, 0, 0
    link = LinkMeter(lambda: arrived, lambda: now)
    learned, reference = Learned(), Learned()
    pacer = RequestPacer(lambda: arrived, link, learned, lambda: 1, lambda: now)
    ever = OneLink(link, reference, lambda: arrived, lambda: now)
    sent: list[int] = []
    sending: list[int] = []
    for seconds, nbytes, what in steps:
        now, arrived = now + seconds, arrived + (nbytes if sending else 0)
        delay = pacer.delay(1)
        assert delay == ever.delay(1)
        if what == "s" and not delay:
            number += 1
            sent.append(number)
            for one in (pacer, ever):
                one.sent(number, 200_000)
        elif what == "b" and len(sending) < len(sent):
            sending.append(sent[len(sending)])
            link.begin("server")
        elif what in "ed" and sending:
            request = sending.pop(0)
            sent.remove(request)
            link.end(nbytes, "server")
            for one in (pacer, ever):
                one.done(request, 1, 150_000 + nbytes)
    assert learned == reference and learned.lead == defaultdict(float, reference.lead)
