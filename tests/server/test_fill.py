"""The solver beneath batch adaptation: against a MILP solver, by each of its ways, and its cost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hapi.errors import UsageError
from hapi.server.batching import subset_sum as module
from hapi.server.batching.subset_sum import Filling, fill

Problem = tuple[list[int], list[int], int]


@st.composite
def problems(draw: st.DrawFn, largest: int = 5000, most: int = 12) -> Problem:
    """Up to six sizes with limits, and a room from nothing to more than all of it."""
    pairs = draw(st.lists(st.tuples(st.integers(1, largest), st.integers(0, most)), min_size=1, max_size=6))
    everything = sum(size * limit for size, limit in pairs)
    room = draw(st.integers(0, everything + 10))
    return [size for size, _ in pairs], [limit for _, limit in pairs], room


def best_by_milp(sizes: list[int], limits: list[int], room: int) -> int:
    solved = milp(
        -np.array(sizes, float),
        integrality=np.ones(len(sizes)),
        bounds=Bounds(0, limits),
        constraints=LinearConstraint(np.array([sizes], float), ub=room),
        options={"mip_rel_gap": 0},
    )
    assert solved.success
    return sum(round(n) * size for n, size in zip(solved.x, sizes, strict=True))


def check(problem: Problem, found: Filling) -> None:
    sizes, limits, room = problem
    assert all(0 <= n <= limit for n, limit in zip(found.counts, limits, strict=True))
    assert found.filled == sum(n * size for n, size in zip(found.counts, sizes, strict=True)) <= room
    assert found.filled <= found.bound <= room


@given(problems())
@settings(max_examples=80)
def test_small_cases_are_as_good_as_a_milp_solver_finds(problem: Problem) -> None:
    found = fill(*problem)
    check(problem, found)
    assert found.filled == found.bound == best_by_milp(*problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lists", "table"), [((), 1 << 27), ((1, 2), 1 << 27), ((1, 2), 0), ((3, 4, 4), 0)], ids=str
)
@given(problem=problems(most=40))
@settings(max_examples=40)
def test_each_way_alone_keeps_its_word(lists: tuple[int, ...], table: int, problem: Problem) -> None:
    best = best_by_milp(*problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LIST_BITS", lists)
        patch.setattr(module, "TABLE_BITS", table)
        found = fill(*problem)
    check(problem, found)
    assert found.filled <= best <= found.bound
    if table:
        assert found.filled == best


def test_what_is_unproven_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = [1000, 1003, 1009], [40, 40, 40], 50_500
    monkeypatch.setattr(module, "LIST_BITS", ())
    monkeypatch.setattr(module, "TABLE_BITS", 0)
    found = fill(*problem)
    assert found.filled < best_by_milp(*problem) <= found.bound == 50_500


@given(problems(), st.integers(0, 10_000))
@settings(max_examples=80)
def test_more_room_is_never_used_less(problem: Problem, more: int) -> None:
    sizes, limits, room = problem
    assert fill(sizes, limits, room).filled <= fill(sizes, limits, room + more).filled


def test_shares_are_near_to_proportional() -> None:
    sizes, limits = [2048, 3072, 5120 * 9], [10_000] * 3
    found = fill(sizes, limits, sum(sizes) * 5000)
    assert found.filled == found.bound
    assert all(4800 <= n <= 5200 for n in found.counts)


@pytest.mark.parametrize("kinds", [1, 3, 7, 20, 100])
def test_its_work_is_bounded(kinds: int) -> None:
    """Real sizes: 0.5 to 40 MiB a sample in units of 512 bytes, 100 requests of up to 255 samples more."""
    works = []
    for seed in range(30):
        rng = random.Random(seed)
        sizes = [512 * rng.randint(1 << 10, 80 << 10) for _ in range(kinds)]
        limits = [100 * 255 // kinds] * kinds
        room = int(sum(s * n for s, n in zip(sizes, limits, strict=True)) * rng.uniform(0.05, 0.95))
        found = fill(sizes, limits, room)
        assert found.filled == found.bound
        works.append(found.sums)
    assert sorted(works)[len(works) // 2] <= 1 << 14
    assert max(works) <= 1 << 18


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (([0], [1], 5), "sizes must be"),
        (([1], [-1], 5), "limits at least 0"),
        (([1], [1], -1), "-1 bytes of room"),
        (([1, 2], [1], 5), "2 sizes and 1 limits"),
        (([1 << 60], [1], 5), "sizes must be"),
        (([1], [1], 1 << 60), "expected 0 to"),
    ],
)
def test_bad_input_is_refused(problem: Problem, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fill(*problem)


def test_nothing_to_fill() -> None:
    assert fill([], [], 100) == Filling(counts=(), filled=0, bound=0, sums=0)
    assert fill([200], [3], 100) == Filling(counts=(0,), filled=0, bound=0, sums=0)


def test_a_size_that_does_not_count_need_not_be_a_multiple() -> None:
    found = fill([1, 1000, 700], [0, 3, 2], 1500)
    assert (found.counts, found.filled, found.bound) == ((0, 0, 2), 1400, 1400)
