"""Tenants that change under a queue: weights and limits at once, lines and counts as they were."""

from __future__ import annotations

from hapi.server.scheduling.fair_queue import FairQueue, Tenant
from hapi.server.status import Board


def begun(queue: FairQueue, now: float = 0.0) -> list[str]:
    """Names of those that begin now."""
    found = []
    while (ticket := queue.next(now)) is not None:
        found.append(ticket.tenant.name)
    return found


def test_a_new_limit_holds_for_those_that_wait() -> None:
    queue, narrow = FairQueue(4, 10), Tenant(name="a", in_flight=1)
    first, *_ = [queue.enter(narrow, 1.0) for _ in range(3)]
    assert begun(queue) == ["a"]
    queue.change_tenants([Tenant(name="a", in_flight=2)])
    assert begun(queue) == ["a"] and queue.of(narrow) == (1, 2)
    queue.change_tenants([Tenant(name="a")])
    assert begun(queue) == ["a"]
    queue.finish(first, 1.0, 1.0)
    assert queue.of(Tenant(name="a")) == (0, 2)


def test_a_rate_that_is_lifted_keeps_nobody() -> None:
    queue, rationed = FairQueue(2, 10), Tenant(name="a", bytes_per_second=10)
    queue.sent(rationed, 10_000)
    queue.enter(rationed, 1.0)
    assert begun(queue) == []
    queue.change_tenants([Tenant(name="a")])
    assert begun(queue) == ["a"]


def test_who_goes_is_forgotten_when_its_requests_are_over() -> None:
    queue, going, new = FairQueue(1, 10), Tenant(name="going"), Tenant(name="new")
    running, waiting = queue.enter(going, 1.0), queue.enter(going, 1.0)
    assert begun(queue) == ["going"]
    queue.change_tenants([new])
    assert queue.of(going) == (1, 1)
    queue.finish(running, 1.0, 1.0)
    assert begun(queue, 1.0) == ["going"]
    queue.finish(waiting, 1.0, 2.0)
    queue.change_tenants([new])
    assert (queue.running, queue.queued) == (0, 0) and not queue._lines


def test_counts_follow_the_name() -> None:
    old, other = Tenant(name="a"), Tenant(name="b")
    board = Board([old, other])
    board.counts_of(old).served = 3
    board.counts_of(other).served = 5
    board.change_tenants([Tenant(name="a", weight=2.0)])
    board.counts_of(other).served += 1  # one that was under way
    assert board.counts_of(old).served == board.counts_of(Tenant(name="a", weight=2.0)).served == 3
    board.change_tenants([old, other])
    assert [board.counts_of(t).served for t in board.tenants] == [3, 1]
