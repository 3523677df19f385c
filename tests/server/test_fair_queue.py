"""The fair queue: weights, no starvation, no idle slot, limits, who goes when it is full, and honest estimates."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.server.scheduling.fair_queue import LEAST_COST, LONGEST_RETRY, FairQueue, Tenant, Ticket

A, B, C = Tenant(name="a"), Tenant(name="b", weight=2.0), Tenant(name="c", weight=0.5)

costs = st.floats(0.01, 5.0)
weights = st.floats(0.1, 10.0)


class Server:
    """A queue with a clock: what runs takes as long as it costs, or as ``truth`` says."""

    def __init__(self, slots: int = 1, max_queued: int = 10**6, slower: float = 1.0) -> None:
        self.queue = FairQueue(slots, max_queued)
        self.slots = slots
        self.slower = slower
        self.now = 0.0
        self.ends: list[tuple[float, int, Ticket]] = []
        self.truth: dict[Ticket, float] = {}
        self.begun: list[tuple[float, Ticket]] = []
        self.shed: list[Ticket] = []

    def ask(self, tenant: Tenant, cost: float, truth: float | None = None) -> Ticket:
        ticket = self.queue.enter(tenant, cost)
        self.truth[ticket] = ticket.cost if truth is None else truth
        self.move_on()
        return ticket

    def move_on(self) -> None:
        while (ticket := self.queue.next(self.now)) is not None:
            self.begun.append((self.now, ticket))
            # Each of the slots does its part of the server's one second of work per second.
            self.ends.append(
                (self.now + self.truth[ticket] * self.slots * self.slower, ticket.number, ticket)
            )
        while (ticket := self.queue.surplus()) is not None:
            self.shed.append(ticket)

    def step(self) -> bool:
        """To the next end, or to the next moment at which a limit lets somebody go on."""
        wake = self.queue.wake_at(self.now)
        end = min(self.ends, default=None)
        if end is not None and end[0] <= wake:
            self.ends.remove(end)
            self.now = end[0]
            self.queue.finish(end[2], self.truth[end[2]], self.now)
        elif wake < math.inf:
            self.now = max(wake, self.now)
        else:
            return False
        self.move_on()
        return True

    def work(self, tenant: Tenant) -> float:
        """Cost of what has begun."""
        return sum(ticket.cost for _, ticket in self.begun if ticket.tenant == tenant)


# -- shares --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(weights, costs), min_size=2, max_size=5),
    st.integers(1, 4),
    st.integers(1, 80),
    st.integers(0, 1 << 32),
)
def test_two_that_wait_get_work_by_their_weights(
    kinds: list[tuple[float, float]], slots: int, steps: int, seed: int
) -> None:
    """SFQ, theorem 1: in every interval in which both wait, within one largest request of each, over its weight."""
    tenants = [Tenant(name=str(i), weight=w) for i, (w, _) in enumerate(kinds)]
    random = Random(seed)
    most = dict(zip(tenants, (c for _, c in kinds), strict=True))
    server = Server(slots)
    for tenant in tenants:
        for _ in range(100):  # more than are begun in all steps together
            server.ask(tenant, most[tenant] * random.uniform(0.1, 1.0))
    marks = [dict.fromkeys(tenants, 0.0)]
    marks[0] = {t: server.work(t) for t in tenants}
    for _ in range(steps):
        server.step()
        marks.append({t: server.work(t) for t in tenants})
        if not all(server.queue.of(t)[0] for t in tenants):
            break
    for f in tenants:
        for g in tenants:
            bound = most[f] / f.weight + most[g] / g.weight + 1e-9
            apart = [m[f] / f.weight - m[g] / g.weight for m in marks[:-1]]
            assert max(apart) - min(apart) <= bound, (f, g)


def test_a_hundred_do_not_delay_one() -> None:
    server = Server(slots=2)
    for _ in range(100):
        server.ask(A, 1.0)
    for _ in range(5):
        server.step()
    late = server.ask(B, 1.0)
    server.step()
    assert late.state == "running", "the next free slot was its own"


def test_wrong_estimates_are_made_up_for() -> None:
    """A tenant whose requests cost ten times what was estimated does not get ten times the work."""
    server, liar = Server(), Tenant(name="liar")
    for _ in range(400):
        server.ask(liar, 0.1, truth=1.0)
        server.ask(A, 0.1, truth=0.1)
    done: Counter[Tenant] = Counter()
    while server.now < 30:
        server.step()
    for _, ticket in server.begun:
        done[ticket.tenant] += 1
    assert done[A] == pytest.approx(10 * done[liar], rel=0.15)


def test_who_was_away_has_saved_nothing() -> None:
    server = Server()
    for _ in range(50):
        server.ask(A, 1.0)
    for _ in range(20):
        server.step()
    for _ in range(50):
        server.ask(Tenant(name="new"), 1.0)
    before = len(server.begun)
    for _ in range(20):
        server.step()
    taken = Counter(ticket.tenant.name for _, ticket in server.begun[before:])
    assert abs(taken["a"] - taken["new"]) <= 1


def test_after_a_pause_all_are_equal_again() -> None:
    server = Server()
    for _ in range(30):
        server.ask(A, 1.0)
    while server.step():
        pass
    running = server.ask(C, 1.0)
    first, second = server.ask(A, 1.0), server.ask(Tenant(name="new"), 1.0)
    assert running.state == "running"
    server.step()
    assert [ticket for _, ticket in server.begun[-2:]] == [first, second], "the last busy period is forgotten"


# -- every order of events -----------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), costs, st.floats(0.1, 3.0)),
        st.tuples(st.just("step"), st.just(0), st.just(0.0), st.just(0.0)),
        st.tuples(st.just("leave"), st.integers(0, 50), st.just(0.0), st.just(0.0)),
        st.tuples(st.just("sent"), st.integers(0, 3), st.floats(0, 3000.0), st.just(0.0)),
    ),
    max_size=120,
)
PEOPLE = (A, B, Tenant(name="two", in_flight=2), Tenant(name="slow", weight=3.0, bytes_per_second=1000))


@given(EVENTS, st.integers(1, 4), st.integers(0, 12))
def test_whatever_happens(events: list[tuple[str, int, float, float]], slots: int, max_queued: int) -> None:
    server = Server(slots, max_queued)
    queue, tickets, gone = server.queue, [], 0
    for what, number, amount, factor in events:
        if what == "ask":
            refused, others = queue.is_full_for(PEOPLE[number]), queue.of(PEOPLE[number])[0]
            tickets.append(server.ask(PEOPLE[number], amount, amount * factor))
            assert refused == (bool(others) and server.shed[-1:] == tickets[-1:]), "foretold before it came"
        elif what == "leave":
            waiting = [t for t in tickets if t.state == "waiting"]
            if waiting:
                queue.leave(waiting[number % len(waiting)])
                gone += 1
                server.move_on()
        elif what == "sent":
            queue.sent(PEOPLE[number], int(amount))
        else:
            server.step()
        waiting = [t for t in tickets if t.state == "waiting"]
        running = [t for t in tickets if t.state == "running"]
        assert (queue.queued, queue.running) == (len(waiting), len(running))
        assert queue.queued <= max_queued and queue.running <= slots + 1
        assert sum(t.tenant.name == "two" for t in running) <= 2
        if queue.running < slots:  # no slot is free while somebody may have it
            assert {t.tenant.name for t in waiting} <= {"two", "slow"}
        for person in PEOPLE:
            wait = queue.expected_wait(person, server.now)
            assert 0 <= wait < math.inf
    while server.step():
        pass
    assert (queue.queued, queue.running) == (0, 0), "nobody waits for ever"
    assert len(server.begun) + len(server.shed) + gone == len(tickets)
    for person in PEOPLE:  # one after the other
        numbers = [t.number for _, t in server.begun if t.tenant == person]
        assert numbers == sorted(numbers)


# -- leaving and being sent away -----------------------------------------------------------------------------------


def test_who_leaves_has_cost_nothing() -> None:
    server = Server()
    server.ask(A, 1.0)
    for _ in range(50):
        server.queue.leave(server.ask(B, 100.0))
    first = server.ask(B, 1.0)
    server.ask(A, 1.0)
    server.step()
    assert first.state == "running"


def test_the_longest_line_makes_room() -> None:
    server = Server(slots=1, max_queued=10)
    heavy = [server.ask(A, 1.0) for _ in range(11)]
    assert server.queue.queued == 10 and not server.shed, "one alone may have the whole queue"
    light = server.ask(Tenant(name="light"), 1.0)
    assert server.shed == [heavy[-1]] and light.state == "waiting"
    again = server.ask(A, 1.0)
    assert server.shed[1:] == [again], "whose line is the longest is sent away itself"


def test_the_queue_is_shared_by_weight() -> None:
    server = Server(slots=1, max_queued=9)
    for _ in range(30):
        server.ask(A, 1.0)
        server.ask(B, 1.0)
    assert (server.queue.of(A)[0], server.queue.of(B)[0]) == (3, 6)


def test_who_asks_rarely_gets_the_extra_slot() -> None:
    server = Server(slots=2)
    for _ in range(8):
        server.ask(A, 1.0)
    for _ in range(4):
        server.step()
    running = server.queue.running
    assert running == 2 and server.queue.expected_wait(B, server.now) == 0.0
    first = server.ask(B, 0.1)
    assert first.state == "running" and server.queue.running == 3
    assert server.queue.expected_wait(B, server.now) > 0.0, "one that runs is enough"
    assert server.ask(B, 0.1).state == "waiting"
    assert server.ask(C, 0.1).state == "waiting", "there is one for all"
    server.step()
    assert server.queue.running == 3 and server.queue.of(C) == (0, 1), "the next one that asks rarely has it"


def test_the_extra_slot_gives_nobody_more_than_its_share() -> None:
    """Two that always wait, and one whose requests cost as much as theirs and follow each other."""
    server = Server(slots=2)
    for _ in range(40):
        server.ask(A, 1.0)
        server.ask(B, 1.0)
    last, extra = server.ask(C, 1.0), 0
    while server.queue.of(A)[0] and server.queue.of(B)[0]:
        if last.state == "over":
            last = server.ask(C, 1.0)
            extra += server.queue.running > 2
        server.step()
    assert extra == 0, "it never is behind its share"
    for tenant in (A, B):
        share = server.work(tenant) / tenant.weight
        assert server.work(C) / C.weight <= share + 1 / C.weight + 1 / tenant.weight


def test_the_rate_counts_what_runs_in_the_extra_slot() -> None:
    queue, cost, seconds = FairQueue(1, 10), 1.0, 1.0
    queue.enter(A, 1.0)
    now, running = 0.0, [queue.next(0.0)]
    for tenant, asks, takes in ((A, 1.0, 1.0), (B, 0.5, 2.0), (A, 1.0, 1.0)):
        ended = running.pop(0)
        now += takes
        assert ended is not None
        queue.finish(ended, ended.cost, now)
        cost, seconds = 0.95 * cost + ended.cost, 0.95 * seconds + takes
        assert queue.rate.per_second == pytest.approx(cost / seconds)
        for someone, each in {A: 1.0, tenant: asks}.items():
            queue.enter(someone, each)
            running.append(queue.next(now))
        running = [ticket for ticket in running if ticket is not None]


def test_without_a_queue_only_free_slots_count() -> None:
    server = Server(slots=2, max_queued=0)
    states = [server.ask(A, 1.0).state for _ in range(3)]
    assert states == ["running", "running", "over"]


# -- limits --------------------------------------------------------------------------------------------------------


def test_requests_in_flight() -> None:
    server, two = Server(slots=4), Tenant(name="two", in_flight=2)
    for _ in range(5):
        server.ask(two, 1.0)
    assert server.queue.of(two) == (3, 2)
    assert server.ask(A, 1.0).state == "running", "the rest is for others"


@given(st.lists(st.integers(1, 5000), min_size=5, max_size=60), st.integers(100, 3000))
def test_bytes_per_second(answers: list[int], rate: int) -> None:
    """Over any time: the rate, a second of it saved up, and the answers that were under way when it was spent."""
    server, slow = Server(slots=2), Tenant(name="slow", bytes_per_second=rate)
    for _ in answers:
        server.ask(slow, LEAST_COST)
    sent, seen = 0, 0
    while True:
        for nbytes in answers[seen : len(server.begun)]:
            server.queue.sent(slow, nbytes)
            sent += nbytes
        seen = len(server.begun)
        assert sent <= rate * (server.now + 1) + 2 * max(answers) + 2
        if not server.step():
            break
    assert seen == len(answers)
    ahead = sum(answers[:-2]) - rate
    assert server.now >= ahead / rate - 0.01
    assert server.now <= sum(answers) / rate + 1, "and not more slowly than it may"


def test_bytes_that_were_not_sent_for_long_are_not_saved_up() -> None:
    """A rate, not a savings account: of a quiet hour the last second counts."""
    queue, slow = FairQueue(1, 4), Tenant(name="slow", bytes_per_second=100)
    for began, nbytes in ((0.0, 100), (3600.0, 350)):
        queue.enter(slow, 1.0)
        ticket = queue.next(began)
        assert ticket is not None
        queue.sent(slow, nbytes)
        queue.finish(ticket, 1.0, began)
    queue.enter(slow, 1.0)
    assert queue.next(3602.4) is None, "250 bytes are owed"
    assert queue.next(3602.6) is not None


def test_who_was_held_back_does_not_get_it_back() -> None:
    server, slow = Server(), Tenant(name="slow", bytes_per_second=100)
    server.queue.sent(slow, 1100)  # ten seconds
    for _ in range(60):
        server.ask(A, 0.5)
        server.ask(slow, 0.5)
    while server.now < 11:
        server.step()
    before = len(server.begun)
    for _ in range(10):
        server.step()
    taken = Counter(ticket.tenant.name for _, ticket in server.begun[before:])
    assert abs(taken["a"] - taken["slow"]) <= 1


# -- how long ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.floats(0.2, 5.0), st.integers(5, 40), st.integers(0, 1 << 32))
def test_the_expected_wait_comes_true(slots: int, slower: float, ahead: int, seed: int) -> None:
    """On a server ``slower`` than estimated: what it says after some requests is what then happens."""
    server, random = Server(slots, slower=slower), Random(seed)

    def ask(tenant: Tenant, count: int) -> None:
        for _ in range(count):
            server.ask(tenant, 0.1 * random.uniform(0.5, 1.5))

    ask(A, 60)
    for _ in range(60):
        server.step()
    ask(A, ahead)
    ask(B, ahead)
    asked = server.now
    expected = server.queue.expected_wait(A, server.now)
    last = server.ask(A, 0.1)
    while last.state == "waiting":
        server.step()
    waited = server.now - asked
    assert waited == pytest.approx(expected, rel=0.35, abs=0.3 * slower * slots)


def test_nobody_waits_for_a_free_slot() -> None:
    server = Server(slots=2)
    assert server.queue.expected_wait(A, 0.0) == 0.0
    server.ask(B, 1.0)
    assert server.queue.expected_wait(A, 0.0) == 0.0
    server.ask(B, 1.0)
    assert server.queue.expected_wait(B, 0.0) > 0.0
    assert server.queue.expected_wait(A, 0.0) == 0.0, "there is one slot more for who asks rarely"
    assert server.queue.expected_wait(B, 0.0, leaving=True) == 0.0, "its own slot will be free"
    waiting = server.ask(B, 1.0)
    assert server.queue.expected_wait(B, 0.0, leaving=True) > 0.0, "for the one who waits already"
    server.queue.leave(waiting)
    limited = Tenant(name="slow", bytes_per_second=10)
    server.queue.sent(limited, 110)
    assert server.queue.expected_wait(limited, 0.0) >= 10.0


def test_those_sent_away_come_back_one_after_the_other() -> None:
    server = Server(slots=1, max_queued=2)
    for _ in range(3):
        server.ask(A, 2.0)
    pauses = [server.queue.retry_after(A, 2.0, server.now) for _ in range(5)]
    assert pauses == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0]), "at the speed at which places come free"
    assert server.queue.retry_after(A, 2.0, 100.0) == pytest.approx(2.0), "what was promised is over"
    assert max(server.queue.retry_after(A, 2.0, 100.0) for _ in range(100)) == LONGEST_RETRY
    wait = server.queue.expected_wait(B, 100.0)
    assert 1.0 <= wait <= server.queue.retry_after(B, 0.01, 100.0) < wait + 1, (
        "nobody of its own is in the queue"
    )
    assert server.queue.retry_after(Tenant(name="vip", weight=1000.0), 0.001, 100.0) >= 1.0


# -- what a new job has to expect ----------------------------------------------------------------------------------


def test_a_new_job_waits_for_all_that_its_tenant_has_here() -> None:
    """Four run and eight wait: beside four of its own, each of these waits for twelve."""
    server = Server(slots=4)
    assert server.queue.lasting_wait(A) == 0
    for _ in range(3):
        server.ask(A, 0.5)
    assert server.queue.lasting_wait(A) == 0, "a slot is free"
    for _ in range(9):
        server.ask(A, 0.5)
    assert server.queue.lasting_wait(A) == pytest.approx(12 * 0.5)


@pytest.mark.parametrize("others", [1, 3])
def test_a_new_tenants_job_waits_for_its_turns(others: int) -> None:
    """Whatever the others' lines: each of its four lets one of each other tenant go first, two of weight 2."""
    server = Server(slots=4)
    for number in range(others):
        for _ in range(40):
            server.ask(Tenant(name=f"t{number}", weight=B.weight), 0.5)
    assert server.queue.lasting_wait(A) == pytest.approx(4 * 2 * others * 0.5)
    assert server.queue.lasting_wait(B) == pytest.approx(4 * others * 0.5)
    assert server.queue.lasting_wait(Tenant(name="t0", weight=B.weight)) >= 40 * 0.5


def test_a_tenant_with_few_requests_takes_no_more_than_these() -> None:
    server = Server(slots=2)
    for _ in range(3):
        server.ask(B, 0.5)
    assert server.queue.lasting_wait(C) == pytest.approx(3 * 0.5)
