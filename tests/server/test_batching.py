"""Batch adaptation: properties that every policy has, the distance to a MILP solver, and what each policy is for."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hapi.errors import DeviceMemoryError, UsageError
from hapi.server.batching.policies import (
    FLAT,
    MAX_BYTES,
    MAX_REQUESTS,
    POLICIES,
    SLOW,
    Adaptation,
    DeviceState,
    Request,
    Weights,
    adapt,
    alone_bytes,
    check_fits,
    flat_batch,
)

MODELS = [Weights(key=name, nbytes=n) for name, n in [("a", 500), ("b", 2000), ("c", 0), ("d", 9000)]]
curves = st.none() | st.dictionaries(
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.floats(1e-6, 1.0), min_size=1
)
policies = st.sampled_from(sorted(POLICIES))


@st.composite
def requests(draw: st.DrawFn, number: int) -> Request:
    smallest = draw(st.integers(1, 8))
    return Request(
        id=f"r{number}",
        samples=draw(st.integers(1, 60)),
        sample_bytes=draw(st.integers(1, 300)),
        fixed_bytes=draw(st.integers(0, 50)),
        weights=tuple(draw(st.lists(st.sampled_from(MODELS), unique=True, max_size=2))),
        smallest=smallest,
        largest=draw(st.integers(smallest, 64)),
        curve=draw(curves),
    )


@st.composite
def queues(draw: st.DrawFn, most: int = 6) -> list[Request]:
    return [draw(requests(number)) for number in range(draw(st.integers(1, most)))]


@st.composite
def devices(draw: st.DrawFn) -> DeviceState:
    resident = frozenset(w.key for w in draw(st.lists(st.sampled_from(MODELS), unique=True)))
    held = sum(w.nbytes for w in MODELS if w.key in resident) + draw(st.integers(0, 3000))
    return DeviceState(budget_bytes=draw(st.integers(0, 40_000)), held_bytes=held, resident=resident)


def bytes_of(device: DeviceState, admitted: Sequence[tuple[Request, int]]) -> int:
    """What these requests add with these batches, weights once: counted anew, in another way than the code's."""
    weights = {w.key: w.nbytes for request, _ in admitted for w in request.weights}
    return sum(n for key, n in weights.items() if key not in device.resident) + sum(
        r.fixed_bytes + batch * r.sample_bytes for r, batch in admitted
    )


def admitted_of(queue: Sequence[Request], found: Adaptation) -> list[tuple[Request, int]]:
    return [(r, found.batches[r.id]) for r in queue if r.id in found.batches]


def bounds_of(policy: str, request: Request, budget: int) -> tuple[int, int]:
    low, high = POLICIES[policy](request)
    alone = (budget - alone_bytes(request, 0)) // request.sample_bytes
    return min(low, alone), min(high, alone)


@given(policies, devices(), queues())
def test_never_above_the_budget_and_within_the_bounds(
    policy: str, device: DeviceState, queue: list[Request]
) -> None:
    found = adapt(policy, device, queue)
    admitted = admitted_of(queue, found)
    assert found.predicted_bytes == bytes_of(device, admitted)
    if admitted:
        assert device.held_bytes + found.predicted_bytes <= device.budget_bytes
    for request, batch in admitted:
        low, high = bounds_of(policy, request, device.budget_bytes)
        assert 1 <= low <= batch <= high <= min(request.largest, request.samples)
        if alone_bytes(request, request.smallest) <= device.budget_bytes:
            assert batch >= min(request.smallest, request.samples)


@given(policies, devices(), queues())
def test_everyone_has_one_place_and_nobody_is_overtaken(
    policy: str, device: DeviceState, queue: list[Request]
) -> None:
    found = adapt(policy, device, queue)
    possible = [r.id for r in queue if r.id not in found.impossible]
    assert [*found.batches, *found.waiting] == possible
    for request in queue:
        never = alone_bytes(request) > device.budget_bytes
        assert (request.id in found.impossible) == never
        assert found.impossible.get(request.id, alone_bytes(request)) == alone_bytes(request)
    # Whoever waits first would not have fitted: not with the least that it and those before it could get.
    assert bool(found.waiting) == bool(found.missing_bytes)
    if found.waiting:
        kept = [r for r in queue if r.id in found.batches or r.id == found.waiting[0]]
        least = [(r, bounds_of(policy, r, device.budget_bytes)[0]) for r in kept]
        assert found.missing_bytes == bytes_of(device, least) - (device.budget_bytes - device.held_bytes) > 0


@given(policies, st.integers(0, 40_000), queues())
def test_the_oldest_that_fits_an_empty_device_is_admitted_first(
    policy: str, budget: int, queue: list[Request]
) -> None:
    found = adapt(policy, DeviceState(budget_bytes=budget), queue)
    fitting = [r.id for r in queue if alone_bytes(r) <= budget]
    assert list(found.batches)[:1] == fitting[:1]
    rounds = 0
    while queue := [r for r in queue if r.id in found.waiting]:  # nobody waits for ever
        found = adapt(policy, DeviceState(budget_bytes=budget), queue)
        rounds += 1
    assert rounds < max(1, len(fitting))


@given(st.sampled_from(["adaptive", "auto"]), devices(), queues())
def test_less_than_a_sample_is_missing_to_what_a_milp_solver_finds(
    policy: str, device: DeviceState, queue: list[Request]
) -> None:
    found = adapt(policy, device, queue)
    admitted = admitted_of(queue, found)
    if not admitted:
        return
    bounds = [bounds_of(policy, r, device.budget_bytes) for r, _ in admitted]
    sizes = np.array([float(r.sample_bytes) for r, _ in admitted])
    constant = bytes_of(device, [(r, 0) for r, _ in admitted])
    solved = milp(
        -sizes,
        integrality=np.ones(len(sizes)),
        bounds=Bounds([low for low, _ in bounds], [high for _, high in bounds]),
        constraints=LinearConstraint(
            sizes[np.newaxis], ub=device.budget_bytes - device.held_bytes - constant
        ),
        options={"mip_rel_gap": 0},
    )
    assert solved.success
    most = constant + round(-solved.fun)
    growing = [r.sample_bytes for (r, batch), (_, high) in zip(admitted, bounds, strict=True) if batch < high]
    assert most - min(growing, default=1) < found.predicted_bytes <= most


@given(policies, devices(), queues(), st.integers(0, 5000))
def test_a_larger_budget_admits_no_fewer_and_uses_no_sample_less(
    policy: str, device: DeviceState, queue: list[Request], more: int
) -> None:
    # Bounds that depend on the budget only through what fits an empty device are left out of the comparison.
    room = max(alone_bytes(r, min(r.largest, r.samples)) for r in queue)
    device = replace(device, budget_bytes=device.budget_bytes + room)
    larger = replace(device, budget_bytes=device.budget_bytes + more)
    before, after = adapt(policy, device, queue), adapt(policy, larger, queue)
    assert list(after.batches)[: len(before.batches)] == list(before.batches)
    if policy != "fixed":
        largest = max(r.sample_bytes for r in queue)
        assert after.predicted_bytes > before.predicted_bytes - largest


def test_another_request_is_worth_some_unused_bytes() -> None:
    """Why the memory used is monotone only for the same requests: 100 of 100 bytes by one, or 97 of 105 by two."""
    queue = [a_request("old", 10, largest=10), a_request("new", 57, largest=1)]
    one = adapt("adaptive", DeviceState(budget_bytes=100), queue[:1])
    both = adapt("adaptive", DeviceState(budget_bytes=105), queue)
    assert (one.predicted_bytes, both.predicted_bytes) == (100, 97)
    assert both.batches == {"old": 4, "new": 1}


def a_request(name: str, sample_bytes: int, **changes: Any) -> Request:
    return Request(**({"id": name, "samples": 1000, "sample_bytes": sample_bytes} | changes))


def test_shared_weights_count_once() -> None:
    backbone, head = Weights(key="backbone", nbytes=1000), Weights(key="head", nbytes=10)
    queue = [a_request(f"r{i}", 1, weights=(backbone,), largest=5) for i in range(3)]
    queue.append(a_request("other", 1, weights=(backbone, head), largest=5))
    found = adapt("adaptive", DeviceState(budget_bytes=10_000), queue)
    assert found.predicted_bytes == 1000 + 10 + 4 * 5
    held = DeviceState(budget_bytes=1030, held_bytes=1000, resident=frozenset({"backbone"}))
    assert adapt("adaptive", held, queue).predicted_bytes == 10 + 4 * 5
    unknown = DeviceState(budget_bytes=1030, held_bytes=1000)
    assert adapt("adaptive", unknown, queue).waiting == ("r0", "r1", "r2", "other")


def test_weights_must_agree_on_their_bytes() -> None:
    queue = [a_request(str(n), 1, weights=(Weights(key="w", nbytes=n),)) for n in (1, 2)]
    with pytest.raises(UsageError, match=r"weights 'w' are . bytes in one request and . in another"):
        adapt("auto", DeviceState(budget_bytes=100), queue)


def test_requests_that_are_alike_get_equal_batches() -> None:
    queue = [a_request(f"r{i}", 7, largest=100) for i in range(3)]
    queue.append(a_request("small", 7, largest=10))
    found = adapt("adaptive", DeviceState(budget_bytes=7 * 102), queue)
    assert found.batches == {"r0": 31, "r1": 31, "r2": 30, "small": 10}


def test_fixed_is_sixteen() -> None:
    queue = [
        a_request("usual", 10),
        a_request("few", 10, samples=5),
        a_request("bounded", 10, largest=12),
        a_request("large", 10, smallest=25),
    ]
    found = adapt("fixed", DeviceState(budget_bytes=10_000), queue)
    assert found.batches == {"usual": 16, "few": 5, "bounded": 12, "large": 25}
    assert adapt("fixed", DeviceState(budget_bytes=110), queue[:1]).batches == {
        "usual": 11
    }  # all that ever fits
    assert adapt("fixed", DeviceState(budget_bytes=200, held_bytes=100), queue[:1]).waiting == ("usual",)


def test_auto_takes_the_beginning_of_the_flat_part() -> None:
    curve = {1: 5.0, 2: 3.0, 4: 1.6, 8: 1.2, 16: 1.03, 32: 1.015, 64: 1.0, 128: 1.01}
    assert flat_batch(curve) == 32
    assert flat_batch(curve, SLOW) == 8
    queue = [a_request("a", 10, curve=curve), a_request("b", 10, curve=curve)]
    plenty = adapt("auto", DeviceState(budget_bytes=10_000), queue)
    assert plenty.batches == {"a": 32, "b": 32}
    assert plenty.predicted_bytes == 640
    tight = adapt("auto", DeviceState(budget_bytes=300), queue)
    assert tight.batches == {"a": 15, "b": 15}
    tighter = adapt("auto", DeviceState(budget_bytes=150), queue)
    assert (tighter.batches, tighter.waiting) == ({"a": 15}, ("b",))  # 7 each would be slow for both
    assert adapt("auto", DeviceState(budget_bytes=10_000), [a_request("new", 10)]).batches == {"new": 16}


@given(st.dictionaries(st.integers(1, 256), st.floats(1e-6, 1.0), min_size=1))
def test_the_flat_batch_is_near_the_best_and_the_smallest_such(curve: dict[int, float]) -> None:
    chosen = flat_batch(curve)
    assert curve[chosen] <= FLAT * min(curve.values())
    assert all(curve[batch] > FLAT * min(curve.values()) for batch in curve if batch < chosen)


def test_what_can_never_fit_blocks_nobody() -> None:
    queue = [a_request("huge", 1000, fixed_bytes=1), a_request("small", 1, largest=4)]
    found = adapt("adaptive", DeviceState(budget_bytes=1000), queue)
    assert (found.impossible, found.batches) == ({"huge": 1001}, {"small": 4})
    with pytest.raises(DeviceMemoryError, match=r"'huge' needs 1001 bytes .* budget is 1000"):
        check_fits(queue[0], 1000)
    check_fits(queue[0], 1001)


def test_a_smallest_batch_that_never_fits_is_given_up() -> None:
    found = adapt("adaptive", DeviceState(budget_bytes=105), [a_request("r", 10, smallest=25)])
    assert found.batches == {"r": 10}


def a_crowd(seed: int) -> tuple[DeviceState, list[Request]]:
    """100 requests of 7 models at 5 splits each, of jobs that share weights; 40 to 95% of what they could use."""
    rng = random.Random(seed)
    models = [Weights(key=f"model{i}", nbytes=rng.randint(5 << 20, 500 << 20)) for i in range(7)]
    sizes = {(m.key, split): 512 * rng.randint(1 << 10, 40 << 10) for m in models for split in range(5)}
    queue = []
    for number in range(100):
        model, split = rng.choice(models), rng.randrange(5)
        each = sizes[model.key, split]
        queue.append(
            a_request(
                f"r{number}",
                each,
                samples=256,
                weights=(model,),
                smallest=8,
                largest=rng.choice([64, 128, 256]),
            )
        )
    most = sum(alone_bytes(r, r.largest) for r in queue)
    return DeviceState(budget_bytes=int(most * rng.uniform(0.4, 0.95))), queue


def test_a_hundred_requests_leave_less_than_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for seed in range(20):
        device, queue = a_crowd(seed)
        begun = time.perf_counter()
        found = adapt("adaptive", device, queue)
        seconds.append(time.perf_counter() - begun)
        growing = [r.sample_bytes for r, batch in admitted_of(queue, found) if batch < r.largest]
        assert device.budget_bytes - found.predicted_bytes < min(growing)
    with capsys.disabled():
        print(
            f"\n100 requests: {1e3 * sorted(seconds)[10]:.2f} ms (median of 20, slowest {1e3 * max(seconds):.2f})"
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"smallest": 0},
        {"smallest": 9, "largest": 8},
        {"sample_bytes": 0},
        {"fixed_bytes": -1},
        {"sample_bytes": MAX_BYTES + 1},
        {"weights": (Weights(key="w", nbytes=-1),)},
        {"weights": (Weights(key="w", nbytes=1),) * 2},
        {"curve": {0: 1.0}},
        {"curve": {1: 0.0}},
        {"curve": {1: math.nan}},
    ],
    ids=str,
)
def test_bad_requests_are_refused_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="request 'r'") as caught:
        a_request("r", **({"sample_bytes": 10} | wrong))
    assert "\n" not in str(caught.value)


def test_bad_calls_are_refused() -> None:
    device = DeviceState(budget_bytes=100)
    with pytest.raises(UsageError, match="unknown batch adaptation 'best'; known are fixed, adaptive, auto"):
        adapt("best", device, [])
    with pytest.raises(UsageError, match="distinct ids"):
        adapt("auto", device, [a_request("r", 1), a_request("r", 2)])
    with pytest.raises(UsageError, match=f"up to {MAX_REQUESTS} requests"):
        adapt("auto", device, [a_request(str(i), 1) for i in range(MAX_REQUESTS + 1)])
    with pytest.raises(UsageError, match="a budget of -1 bytes"):
        DeviceState(budget_bytes=-1)
    with pytest.raises(UsageError, match="at least one measured batch"):
        flat_batch({})
