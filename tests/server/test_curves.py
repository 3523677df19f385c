"""How the COS batch is looked for: bounds on choice and cost for any curve, drift, requests of any size, memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import UsageError
from hapi.server.batching.policies import FLAT, SLOW
from hapi.server.batching.throughput_curve import LOWEST, MAX_REFUSALS, OBSERVATIONS, RARELY, SOON, TimeCurves

LOW = 4
"""Lower than usual, so that both directions are tried."""
POWERS = [1 << n for n in range(9)]


def run(
    curves: TimeCurves,
    each: Callable[[int], float],
    requests: int,
    samples: int = 128,
    largest: int = 1000,
    key: str = "front",
) -> list[int]:
    """Requests one after another, with all their passes observed; the batch of each."""
    chosen = []
    for _ in range(requests):
        batch = curves.propose(key, min(samples, largest))
        chosen.append(batch)
        for begin in range(0, samples, batch):
            count = min(batch, samples - begin)
            curves.observe(key, count, count * each(count))
    return chosen


def overhead(fixed: float) -> Callable[[int], float]:
    """Seconds per sample where a pass costs ``fixed`` samples' time beside its own."""
    return lambda count: 1.0 + fixed / count


def test_goes_up_while_it_pays() -> None:
    curves = TimeCurves(lowest=LOW)
    chosen = run(curves, overhead(2.0), 100, samples=1024)
    assert chosen[0] == 16 and chosen[-1] == 128  # 1.0156, within 2% of 1024's 1.002
    assert set(chosen) >= {16, 32, 64, 128, 256, 512}
    curve = curves.curve("front")
    assert curve is not None and curve[128] == pytest.approx(1 + 2 / 128)


def test_goes_down_while_it_pays_and_not_below_the_lowest() -> None:
    curves = TimeCurves(lowest=LOW)
    chosen = run(curves, lambda count: 1.0 + count / 8, 60)
    assert chosen[-1] == LOW and min(chosen) == LOW and max(chosen) == 32


def test_the_smallest_of_a_flat_curve() -> None:
    assert run(TimeCurves(lowest=LOW), lambda count: 1.0, 60)[-1] == LOW


def test_a_far_slower_size_is_tried_twice() -> None:
    curves = TimeCurves(lowest=LOW)
    seen: list[int] = []

    def each(count: int) -> float:
        seen.append(count)
        return 10.0 if count > 16 else 1.0

    run(curves, each, 60, samples=32)
    assert seen.count(32) == 2


@given(
    st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9),
    st.floats(0.0, 0.1),
    st.integers(0, 1 << 32),
    st.integers(16, 256),
)
def test_choice_and_cost_for_any_curve(times: list[float], noise: float, seed: int, samples: int) -> None:
    """Bumps included. Within the stated bound of the best that was tried; the look's samples are bounded."""
    table = dict(zip(POWERS, times, strict=True))
    uniform = random.Random(seed).uniform
    curves, tried = TimeCurves(lowest=LOW), {}
    passes = dict.fromkeys(POWERS, 0)
    looked = 0
    for _ in range(200):
        batch = curves.propose("k", samples)
        assert 1 <= batch <= samples
        if curves.curve("k") is not None:
            break
        for _ in range(samples // batch):
            # One observation more than is needed would be a pass "under way".
            if curves.curve("k") is None and curves.propose("k", samples) == batch:
                looked += batch
                passes[batch] += 1
                tried[batch] = table[batch]
                curves.observe("k", batch, batch * table[batch] * uniform(1 - noise, 1 + noise))
    assert curves.curve("k") is not None
    choice = curves.propose("k", samples)
    assert table[choice] <= FLAT * (1 + noise) / (1 - noise) * min(tried.values()) * (1 + 1e-9)
    assert all(choice <= size or table[size] > table[choice] * (1 - 2 * noise) for size in tried)
    assert looked < 2 * OBSERVATIONS * samples + MAX_REFUSALS * samples


@pytest.mark.slow
@given(st.floats(0.0, 64.0), st.floats(0.0, 0.02), st.floats(0.0, 0.004), st.integers(0, 1 << 32))
def test_within_three_percent_of_the_best_of_all_convex_curves(
    fixed: float, slope: float, noise: float, seed: int
) -> None:
    """A pass's overhead on one side, caches that overflow on the other; what is lost in a long run is small."""
    uniform = random.Random(seed).uniform

    def true(count: int) -> float:
        return 1.0 + fixed / count + slope * count

    curves = TimeCurves(lowest=LOW)
    total = best = 0.0
    lowest = min(true(size) for size in POWERS if size >= LOW)
    for _ in range(300):
        batch = curves.propose("k", 256)
        for _ in range(256 // batch):
            curves.observe("k", batch, batch * true(batch) * uniform(1 - noise, 1 + noise))
        total += 256 * true(batch)
        best += 256 * lowest
    for _ in range(60):  # another look may just be under way
        batch = curves.propose("k", 256)
        if curves.curve("k") is not None:
            break
        curves.observe("k", batch, batch * true(batch))
    assert true(curves.propose("k", 256)) <= 1.03 * lowest
    # The look: at worst passes of LOW or 256 samples, as slow as those are, for their share of the samples.
    worst = max(true(LOW), true(16), true(256))
    looked = (2 * OBSERVATIONS + MAX_REFUSALS + 7) * 256 * (worst - lowest)
    assert total <= 1.03 * best + looked


def test_looks_again_rarely_and_finds_what_has_moved() -> None:
    curves = TimeCurves(lowest=LOW)
    first = run(curves, overhead(0.0), 40)
    assert first[-1] == LOW
    look = next(n for n in range(40) if curves_settled(first, n))
    # A change that does not show at the choice itself: found at the next look.
    later = run(curves, lambda count: 1.0 if count <= LOW else 0.5, 900)
    assert later[-1] == 2 * LOW
    assert later.index(next(b for b in later if b != LOW)) >= RARELY * 4 * LOW // 128 - look


def curves_settled(chosen: list[int], index: int) -> bool:
    """Whether all from ``index`` on are the same."""
    return len(set(chosen[index:])) == 1


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_factor_of_two_is_noticed(factor: float) -> None:
    """All is slower or faster: the choice stays, and what it takes is known anew long before the next usual look."""
    curves = TimeCurves(lowest=LOW)
    run(curves, overhead(2.0), 60, samples=256)
    before = curves.curve("front")
    assert before is not None
    look_samples = OBSERVATIONS * sum(before)
    requests = (SOON + 2) * look_samples // 256 + 10
    run(curves, lambda count: factor * overhead(2.0)(count), requests, samples=256)
    after = curves.curve("front")
    assert after is not None and after[64] == pytest.approx(factor * before[64])
    assert requests < RARELY * look_samples // 256


def test_another_speed_may_mean_another_choice() -> None:
    curves = TimeCurves(lowest=LOW)
    assert run(curves, overhead(0.0), 60)[-1] == LOW
    assert run(curves, overhead(8.0), 60)[-1] == 128


def test_partial_batches_count_for_themselves_alone() -> None:
    """Requests of 100 samples end in one of 4, far dearer a sample than any other; it is no part of the chain yet."""
    curves = TimeCurves(lowest=LOW)
    for _ in range(4):
        curves.observe("k", 16, 16.0)
        curves.observe("k", 4, 400.0)
    assert curves.propose("k", 100) == 32
    curves.observe("k", 7, 1.0)  # no power of two: never tried
    for _ in range(40):
        batch = curves.propose("k", 100)
        curves.observe("k", batch, float(batch))
    curve = curves.curve("k")
    assert curve is not None and set(curve) == {4, 8, 16, 32, 64} and set(curve.values()) == {1.0}


def test_never_above_the_largest() -> None:
    curves = TimeCurves(lowest=LOW)
    chosen = run(curves, overhead(100.0), 60, samples=100)
    assert max(chosen) == 64 == chosen[-1] and curves.curve("front") is not None
    assert curves.propose("front", 48) == 48 and curves.propose("front", 1) == 1
    for largest in (1, 2, 3):
        curves = TimeCurves(lowest=LOW)
        assert max(run(curves, overhead(1.0), 12, largest=largest)) <= largest
        curve = curves.curve("front")
        assert curve is not None and set(curve) == {1 if largest == 1 else 2}


def test_small_requests_among_large_ones_do_not_stop_a_look() -> None:
    curves = TimeCurves(lowest=LOW)
    for _ in range(60):
        run(curves, overhead(50.0), MAX_REFUSALS - 1, samples=8)
        run(curves, overhead(50.0), 1, samples=512)
    assert curves.propose("front", 512) == 512


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 20))
def test_requests_of_any_sizes_in_any_order(sizes: list[int], lowest: int) -> None:
    curves = TimeCurves(lowest=lowest)
    for size in sizes:
        assert max(run(curves, overhead(5.0), 1, samples=size)) <= size


def test_a_look_that_meets_only_small_requests_ends() -> None:
    """Two passes of 16, fewer than a look takes, and then nobody who could have 16."""
    curves = TimeCurves()
    run(curves, overhead(1.0), 1, samples=40)
    assert run(curves, overhead(1.0), 2 * MAX_REFUSALS, samples=3) == [3] * 2 * MAX_REFUSALS
    assert curves.curve("front") == {16: pytest.approx(1 + 1 / 16)}


def test_a_halved_batch_is_observed_as_what_ran() -> None:
    """The device ran out of memory and halved: 32 is never seen, and given up when requests are bounded by 16."""
    curves = TimeCurves(lowest=LOW)
    for _ in range(OBSERVATIONS):
        curves.observe("k", 16, 16.0)
    assert curves.propose("k", 128) == 32
    curves.observe("k", 16, 16.0)
    for _ in range(MAX_REFUSALS + 10):
        batch = curves.propose("k", 16)
        curves.observe("k", batch, batch * 1.0)
    assert curves.curve("k") is not None and curves.propose("k", 16) == LOW


def test_keys_are_apart_and_few() -> None:
    curves = TimeCurves(keys=2, lowest=LOW)
    run(curves, overhead(0.0), 40, key="a")
    run(curves, overhead(30.0), 40, key="b")
    assert curves.propose("a", 128) == LOW and curves.propose("b", 128) == 128
    curves.propose("c", 128)
    assert len(curves) == 2 and curves.curve("a") is None and curves.curve("b") is not None
    assert curves.curve("never") is None and len(curves) == 2


def test_the_same_observations_give_the_same_proposals() -> None:
    assert run(TimeCurves(lowest=LOW), overhead(5.0), 80) == run(TimeCurves(lowest=LOW), overhead(5.0), 80)


@pytest.mark.parametrize("wrong", [(0, 1.0), (16, 0.0), (16, -1.0), (16, float("nan")), (16, float("inf"))])
def test_nonsense_is_refused(wrong: tuple[int, float]) -> None:
    with pytest.raises(UsageError):
        TimeCurves(lowest=LOW).observe("k", *wrong)
    with pytest.raises(UsageError):
        TimeCurves(lowest=LOW).propose("k", 0)
    with pytest.raises(UsageError):
        TimeCurves(keys=0)
    with pytest.raises(UsageError):
        TimeCurves(lowest=0)


def test_usually_not_below_16() -> None:
    assert min(run(TimeCurves(), lambda count: 1.0 + count, 30)) == LOWEST == 16 and SLOW > FLAT > 1
