"""Whose forward pass is next: the tenant's who used the device least of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.server.scheduling.device_share import HALF_LIFE, DeviceScheduler
from hapi.server.scheduling.fair_queue import Tenant

A, B, C = Tenant(name="a"), Tenant(name="b"), Tenant(name="c", weight=3.0)


def served(turns: DeviceScheduler[Tenant], rounds: int, each: float = 1.0) -> list[Tenant]:
    """Who is served when everybody always has a pass waiting."""
    order = []
    for turn in range(rounds):
        tenant = turns.next(turn * each)
        order.append(tenant)
        turns.charge(tenant, each, (turn + 1) * each)
        turns.add(tenant, 0, tenant)
    return order


def test_first_come_first_served_among_equals() -> None:
    turns: DeviceScheduler[str] = DeviceScheduler()
    turns.add(A, 2, "later request")
    turns.add(A, 1, "older request")
    turns.add(B, 1, "another tenant's, later")
    assert [turns.next(0.0) for _ in range(3)] == [
        "older request",
        "another tenant's, later",
        "later request",
    ]
    with pytest.raises(IndexError):
        turns.next(0.0)


def test_who_used_little_goes_first_with_all_that_it_has() -> None:
    turns: DeviceScheduler[str] = DeviceScheduler()
    turns.charge(A, 5.0, 0.0)
    for number in range(4):
        turns.add(A, 1, f"heavy {number}")
        turns.add(B, 2, f"light {number}")
    for _ in range(4):
        assert turns.next(1.0).startswith("light")
        turns.charge(B, 0.1, 1.0)
    assert turns.next(1.0).startswith("heavy")


def test_shares_follow_the_weights() -> None:
    turns: DeviceScheduler[Tenant] = DeviceScheduler()
    for tenant in (A, B, C):
        turns.add(tenant, 0, tenant)
    order = served(turns, 500)
    shares = {tenant: order.count(tenant) / len(order) for tenant in (A, B, C)}
    assert shares[A] == pytest.approx(0.2, abs=0.02) and shares[C] == pytest.approx(0.6, abs=0.02)


def test_use_is_forgotten() -> None:
    turns: DeviceScheduler[str] = DeviceScheduler()
    turns.charge(A, 8.0, 0.0)
    assert turns.used(A, 3 * HALF_LIFE) == pytest.approx(1.0)
    assert turns.used(B, 0.0) == 0


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3)), min_size=1, max_size=60))
def test_everything_is_served_once(items: list[tuple[Tenant, int]]) -> None:
    turns: DeviceScheduler[int] = DeviceScheduler()
    for number, (tenant, order) in enumerate(items):
        turns.add(tenant, order, number)
    found = []
    while turns:
        found.append(turns.next(float(len(found))))
        turns.charge(items[found[-1]][0], 1.0, float(len(found)))
    assert sorted(found) == list(range(len(items)))


@given(st.lists(st.floats(0.01, 5.0), min_size=50, max_size=120), st.floats(0.01, 5.0))
def test_nobody_starves(rivals: list[float], own: float) -> None:
    """However long the others' passes are, whoever waits is served before they had much more than it."""
    turns: DeviceScheduler[str] = DeviceScheduler()
    now, others = 0.0, 0.0
    turns.charge(A, own, now)
    turns.add(A, 0, "own")
    for number, seconds in enumerate(rivals):
        turns.add(B, number, "rival")
        if turns.next(now) == "own":
            return
        now += seconds
        others += seconds
        turns.charge(B, seconds, now)
        assert others <= 4 * (own + max(rivals)) or now > HALF_LIFE, "the other had enough"
    assert others <= own + 2 * max(rivals)


def test_what_is_taken_does_not_wait_any_more() -> None:
    turns: DeviceScheduler[int] = DeviceScheduler()
    for number in range(6):
        turns.add(A, 0, number)
    assert turns.take(lambda n: n % 2 == 1) == [1, 3, 5]
    assert [turns.next(0.0) for _ in range(len(turns))] == [0, 2, 4]


def test_tenants_of_long_ago_take_no_memory() -> None:
    turns: DeviceScheduler[int] = DeviceScheduler()
    for number in range(5000):
        turns.charge(Tenant(name=f"t{number}"), 1.0, number * HALF_LIFE)
    assert len(turns._used) <= 1025
