"""How free memory is shared out: never more than there is, next to none left, and the same part for everyone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hapi.server.batching.memory_shares import Bounds, raise_batches


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Bounds], int]:
    """Up to twelve requests of a few sizes, and a room from nothing to more than all of it."""
    sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
    requests = []
    for _ in range(draw(st.integers(0, 12))):
        low = draw(st.integers(1, 20))
        requests.append(Bounds(draw(st.sampled_from(sizes)), low, low + draw(st.integers(0, 40))))
    return requests, draw(st.integers(0, raised_bytes(requests, [r.high for r in requests]) + 10))


def raised_bytes(requests: list[Bounds], batches: list[int]) -> int:
    return sum((batch - r.low) * r.sample_bytes for r, batch in zip(requests, batches, strict=True))


@given(crowds())
def test_the_room_is_kept_and_less_than_a_sample_of_it_is_left(crowd: tuple[list[Bounds], int]) -> None:
    requests, room = crowd
    batches = raise_batches(requests, room)
    assert all(r.low <= batch <= r.high for r, batch in zip(requests, batches, strict=True))
    left = room - raised_bytes(requests, batches)
    assert left >= 0
    growing = [r.sample_bytes for r, batch in zip(requests, batches, strict=True) if batch < r.high]
    assert not growing or left < min(growing), "a batch could still have been raised"


@given(crowds(), st.integers(0, 10_000))
def test_more_room_is_used_less_by_less_than_a_sample(crowd: tuple[list[Bounds], int], more: int) -> None:
    requests, room = crowd
    before = raised_bytes(requests, raise_batches(requests, room))
    after = raised_bytes(requests, raise_batches(requests, room + more))
    assert after > before - max((r.sample_bytes for r in requests), default=1)


@given(crowds())
def test_alike_requests_stand_at_one_level(crowd: tuple[list[Bounds], int]) -> None:
    """Where bounds allow: one batch is larger than another's by more than one only if that one cannot grow."""
    requests, room = crowd
    batches = raise_batches(requests, room)
    for one, batch in zip(requests, batches, strict=True):
        for other, others in zip(requests, batches, strict=True):
            if one.sample_bytes == other.sample_bytes and batch > one.low and others < other.high:
                assert batch <= others + 1


def test_shares_are_near_to_proportional() -> None:
    requests = [Bounds(2048, 1, 10_001), Bounds(3072, 1, 10_001), Bounds(5120 * 9, 1, 10_001)]
    batches = raise_batches(requests, sum(r.sample_bytes for r in requests) * 5000)
    assert batches == [5001] * 3


def test_nothing_to_share() -> None:
    assert raise_batches([], 100) == []
    assert raise_batches([Bounds(200, 3, 9)], 100) == [3]
    assert raise_batches([Bounds(1, 5, 5), Bounds(1000, 2, 5)], 1500) == [5, 3]
