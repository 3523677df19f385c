"""The activation planner: equations 1 to 8, Algorithm 1, its three cases, and an independent replay of the choice."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.offload.activations.reporting import planned
from hapi.offload.layer_memory import Action, Layer, Working
from hapi.offload.planner import (
    Case,
    Machine,
    Plan,
    Problem,
    StateTraffic,
    backward_seconds,
    by_benefit,
    evaluate,
    forward_seconds,
    iteration_seconds,
    paper_traffic,
    plan_activations,
    recomputed_flops,
    sweep,
)

GB = 10**9


def block(
    name: str,
    flops: float,
    saved: int,
    inputs: int = 0,
    recomputable: bool = True,
    working: Working = Working(),  # noqa: B008 - frozen
) -> Layer:
    return Layer(
        name=name,
        flops=flops,
        saved_bytes=saved,
        input_bytes=inputs,
        recomputable=recomputable,
        working=working,
    )


def machine(**changes: float) -> Machine:
    base = Machine(thp_g=1e12, bw_s2m=2e9, bw_m2s=1e9, device_bytes=GB, buffer_bytes=0)
    return replace(base, **changes)  # type: ignore[arg-type]


def random_problem(seed: int) -> Problem:
    """Any mix of layers, rates, room and traffic."""
    rng = random.Random(seed)
    layers = [
        block(
            f"layer{i}",
            rng.choice([0.0, rng.uniform(1e9, 1e12)]),
            rng.choice([0, rng.randrange(1, GB)]),
            rng.randrange(0, GB // 10),
            rng.random() > 0.2,
            Working(after=rng.randrange(0, GB // 10)),
        )
        for i in range(rng.randrange(1, 14))
    ]
    on_gpu = rng.random() < 0.5
    return Problem(
        layers=layers,
        machine=machine(
            thp_g=rng.uniform(1e10, 1e13),
            bw_s2m=rng.uniform(1e8, 1e10),
            bw_m2s=rng.uniform(1e8, 1e10),
            bw_g=rng.uniform(1e9, 3e10) if on_gpu else math.inf,
            device_bytes=rng.randrange(0, 3 * GB),
            host_bytes=rng.randrange(0, 2 * GB) if on_gpu else 0,
            buffer_bytes=rng.randrange(0, GB // 4),
            backward_factor=rng.uniform(1, 3),
        ),
        traffic=paper_traffic(rng.randrange(0, 10**9)) if rng.random() < 0.5 else StateTraffic(),
    )


def paper_problem(batch: int, layers: int = 40, width: int = 5120, tokens: int = 1024) -> Problem:
    """The 13B model of Figure 9b on an RTX 4090 with 12 SSDs: blocks of attention and feed-forward parts."""
    parts = []
    for i in range(layers):
        for name, share in (("attention", 4), ("feed", 8)):
            flops = 2.0 * share * width * width * batch * tokens
            saved = (5 if name == "attention" else 11) * batch * tokens * width
            parts.append(block(f"{i}.{name}", flops, saved, batch * tokens * width * 2))
    return Problem(
        layers=parts,
        machine=Machine(
            thp_g=160e12,
            bw_s2m=32e9,
            bw_m2s=32e9,
            bw_g=21e9,
            device_bytes=4 * GB,
            host_bytes=40 * GB,
            buffer_bytes=GB,
        ),
        traffic=paper_traffic(13 * 10**9),
    )


def replay(problem: Problem, plan: Plan) -> float:
    """Seconds of an iteration, played event by event: nothing here is taken from the equations.

    Compute, the link in each direction and the disk are four servers, each with a queue of jobs in order. A layer's
    activations leave after it was computed, a layer's backward pass waits for them to be back. What the states move is
    cut into as many parts as there are layers and takes its turn among the activations.
    """
    m, t, count = problem.machine, problem.traffic, len(problem.layers)

    def took(nbytes: float, rate: float) -> float:
        return nbytes / rate if nbytes else 0.0

    now = out = inward = disk = 0.0
    for layer, treated in zip(problem.layers, plan.layers, strict=True):
        inward += took(t.forward_link_in / count, m.bw_g)
        disk += took(t.forward_disk_read / count, m.bw_s2m)
        now += layer.flops / m.thp_g
        out = max(out, now) + took(treated.host_bytes + treated.disk_bytes, m.bw_g)
        if treated.disk_bytes:
            disk = max(disk, out) + took(treated.disk_bytes, m.bw_m2s)
    now = out = inward = disk = max(now, out, inward, disk)
    for layer, treated in zip(reversed(problem.layers), reversed(plan.layers), strict=True):
        disk += took(t.backward_disk_read / count + treated.disk_bytes, m.bw_s2m)
        disk += took(t.backward_disk_write / count, m.bw_m2s)
        back = treated.host_bytes + treated.disk_bytes
        inward = max(inward, disk if treated.disk_bytes else 0.0)
        inward += took(t.backward_link_in / count + back, m.bw_g)
        redone = layer.flops if treated.action is Action.RECOMPUTE else 0.0
        now = max(now, inward if back else 0.0) + (m.backward_factor * layer.flops + redone) / m.thp_g
        out = max(out, now) + took(t.backward_link_out / count, m.bw_g)
    return max(now, out, inward, disk)


def test_equations_of_a_case_done_by_hand() -> None:
    """One layer of 4 GB and 8 TFLOP, another of 2 GB and 1 TFLOP; 1 GB stays, 1 GB fits the host."""
    problem = Problem(
        layers=[block("a", 8e12, 4 * GB), block("b", 1e12, 2 * GB)],
        machine=machine(bw_g=4e9, device_bytes=5 * GB, host_bytes=GB),
        traffic=paper_traffic(10**9),
    )
    assert problem.kept_bytes == GB and problem.safe_bytes == 0
    assert forward_seconds(problem, 6 * GB) == pytest.approx(max(9.0, 5 / 4, 2 / 4, 2 / 2 + 4 / 1))
    assert backward_seconds(problem, 6 * GB, 0.0) == pytest.approx(
        max(18.0, 2 / 4, (2 + 5) / 4, (14 + 4) / 2 + 14)
    )
    assert by_benefit(problem) == [0, 1]
    assert recomputed_flops(problem, 5 * GB) == pytest.approx(0.5e12)  # the second layer's half (equation 7)


def test_slope_of_the_recomputed_work_is_the_benefit() -> None:
    problem = Problem(layers=[block("a", 3e12, GB), block("b", 1e12, GB)], machine=machine())
    step = GB // 100
    for start, layer in ((0, 0), (GB, 1)):
        slope = (recomputed_flops(problem, start + step) - recomputed_flops(problem, start)) / step
        assert slope == pytest.approx(-problem.layers[layer].benefit)  # equation 8


@pytest.mark.parametrize("seed", range(60))
def test_iteration_time_is_convex(seed: int) -> None:
    problem = random_problem(seed)
    low, high = problem.safe_bytes, problem.all_bytes
    points = [low + (high - low) * i / 40 for i in range(41)]
    times = [iteration_seconds(problem, point) for point in points]
    for before, middle, after in zip(times, times[1:], times[2:], strict=False):
        assert middle <= (before + after) / 2 * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(200))
def test_algorithm_finds_the_least_of_the_sweep_and_stays_safe(seed: int) -> None:
    problem = random_problem(seed)
    plan = plan_activations(problem)
    assert plan.saved_bytes >= problem.safe_bytes
    assert plan.seconds <= min(choice.seconds for choice in sweep(problem)) * (1 + 1e-9)
    for layer, treated in zip(problem.layers, plan.layers, strict=True):
        saved = layer.input_bytes + (0 if treated.action is Action.RECOMPUTE else layer.saved_bytes)
        assert treated.kept_bytes + treated.host_bytes + treated.disk_bytes == saved
        assert layer.recomputable or treated.action is not Action.RECOMPUTE
    assert sum(treated.host_bytes for treated in plan.layers) <= problem.machine.host_bytes
    if problem.machine.device_bytes >= problem.other_bytes + problem.machine.buffer_bytes:
        assert plan.peak_bytes <= problem.machine.device_bytes


@pytest.mark.parametrize("seed", range(20))
def test_order_by_benefit_is_the_best_of_all_subsets_for_layers_of_one_size(seed: int) -> None:
    """For layers of one size no layer is cut, so that the paper's proof holds for every subset."""
    rng = random.Random(seed)
    layers = [block(str(i), rng.uniform(1e9, 1e12), GB // 8) for i in range(8)]
    problem = Problem(
        layers=layers,
        machine=machine(thp_g=rng.uniform(1e11, 1e13), bw_m2s=rng.uniform(1e8, 4e9), device_bytes=GB // 4),
    )
    subsets = (s for size in range(9) for s in combinations(range(8), size))
    best = min(evaluate(problem, subset).seconds for subset in subsets)
    assert plan_activations(problem).seconds == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "changes", "case"),
    [
        (24, {"bw_g": 3e9}, Case.TRANSFERS),
        pytest.param(48, {}, Case.BALANCED, marks=pytest.mark.slow),
        pytest.param(48, {"thp_g": 20e12}, Case.COMPUTATION, marks=pytest.mark.slow),
    ],
)
def test_the_three_cases_of_the_paper_replayed(batch: int, changes: dict[str, float], case: Case) -> None:
    base = paper_problem(batch)
    problem = replace(base, machine=replace(base.machine, **changes))  # type: ignore[arg-type]
    plan = plan_activations(problem)
    assert plan.case is case
    best = min(replay(problem, choice) for choice in sweep(problem))
    assert replay(problem, plan) <= 1.03 * best


def cpu_problem(disk: float, memory: int) -> Problem:
    """A transformer on two cores: 24 blocks, the host's memory is the device, its disk the only tier."""
    return Problem(
        layers=[block(str(i), 40e9, 150 * 10**6, 12 * 10**6) for i in range(24)],
        machine=Machine(thp_g=1e11, bw_s2m=disk, bw_m2s=disk, device_bytes=memory, buffer_bytes=64 << 20),
    )


@pytest.mark.parametrize(
    ("disk", "memory", "case"),
    [
        (1e9, GB, Case.COMPUTATION),
        (100e6, GB, Case.BALANCED),
        (5e6, GB, Case.BALANCED),  # what has room in memory is never recomputed, however slow the disk
        (5e6, GB // 3, Case.TRANSFERS),
    ],
)
def test_cases_on_a_cpu_replayed(disk: float, memory: int, case: Case) -> None:
    problem = cpu_problem(disk, memory)
    plan = plan_activations(problem)
    assert plan.case is case
    best = min(replay(problem, choice) for choice in sweep(problem))
    assert replay(problem, plan) <= 1.03 * best


def test_what_has_room_is_kept_also_where_computing_it_again_would_hide_behind_the_disk() -> None:
    """What the states move takes longer than all else; computing less leaves the processor to what else it does."""
    states = StateTraffic(backward_disk_read=40 * GB, backward_disk_write=40 * GB)
    problem = replace(cpu_problem(1e9, GB), traffic=states)
    plan = plan_activations(problem)
    assert plan.seconds == min(choice.seconds for choice in sweep(problem)) and plan.case is Case.TRANSFERS
    recomputed = [layer.action for layer in plan.layers].count(Action.RECOMPUTE)
    inputs, room = 24 * 12 * 10**6, GB - (64 << 20) - 150 * 10**6
    assert recomputed == 24 - (room - inputs) // (150 * 10**6) and not plan.swapped_bytes


def test_what_fits_is_kept() -> None:
    problem = Problem(layers=[block("a", 1e12, GB // 2)] * 2, machine=machine())
    plan = plan_activations(problem)
    assert plan.case is Case.FITS and plan.swapped_bytes == 0
    assert {layer.action for layer in plan.layers} == {Action.KEEP}
    assert plan.seconds == pytest.approx(6.0) and plan.peak_bytes == GB


def test_a_report_has_no_seconds_of_a_disk_that_nobody_measured() -> None:
    problem = Problem(
        layers=[block("a", 1e9, 10)],
        machine=machine(bw_s2m=0.0, bw_m2s=0.0),
        traffic=StateTraffic(backward_disk_read=5, backward_disk_write=5),
    )
    report = planned(problem, plan_activations(problem), {"a": None})
    assert report["backward_seconds"] is None and report["forward_seconds"] > 0
    json.dumps(report, allow_nan=False)


def test_without_a_tier_below_what_does_not_fit_is_recomputed() -> None:
    layers: Sequence[Layer] = [block(str(i), 1e12, GB // 4) for i in range(8)]
    plan = plan_activations(Problem(layers=layers, machine=machine(bw_s2m=0, bw_m2s=0)))
    assert plan.disk_bytes == 0 and math.isfinite(plan.seconds)
    assert sum(layer.action is Action.RECOMPUTE for layer in plan.layers) == 5
    assert plan.peak_bytes <= GB


def test_without_a_tier_and_without_recomputation_the_plan_says_never() -> None:
    layers = [block(str(i), 1e12, GB, recomputable=False) for i in range(3)]
    plan = plan_activations(Problem(layers=layers, machine=machine(bw_s2m=0, bw_m2s=0)))
    assert math.isinf(plan.seconds)


def test_a_layer_without_room_to_be_recomputed_is_swapped() -> None:
    layers = [block("large", 1.0, 2 * GB), block("small", 1.0, GB // 2)]
    problem = Problem(layers=layers, machine=machine(bw_m2s=1e3, bw_s2m=1e3))
    plan = plan_activations(problem)
    assert plan.layers[0].action is Action.DISK and plan.saved_bytes >= 2 * GB


def test_the_last_layers_stay() -> None:
    """They are needed first; the first ones have the longest time away."""
    layers = [block(str(i), 1e12, GB // 4, recomputable=False) for i in range(6)]
    plan = plan_activations(Problem(layers=layers, machine=machine()))
    assert [layer.action for layer in plan.layers] == [Action.DISK] * 2 + [Action.KEEP] * 4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 200))
def test_tensors_are_kept_whole(tensors: list[int], room: int) -> None:
    layer = Layer(name="a", flops=1.0, saved_bytes=sum(tensors), tensors=tuple(tensors))
    kept = layer.kept_of(room)
    assert kept <= room and layer.kept_of(kept) == kept
    assert kept == sum(tensors) or room < sum(tensors)
    layers = [layer, block("last", 1.0, 100)]
    plan = evaluate(Problem(layers=layers, machine=machine(device_bytes=100 + room)), range(2))
    assert plan.layers[0].kept_bytes + plan.layers[0].disk_bytes == sum(tensors)
    assert plan.layers[0].kept_bytes in (kept, sum(tensors))


def test_memory_is_that_of_the_worst_moment() -> None:
    """The first layer works with much where nothing else is kept any more; the loss comes when everything is."""
    loss = block("c", 1.0, 100, working=Working(after=300))
    layers = [block("a", 1.0, 100, working=Working(backward=450)), block("b", 1.0, 100), loss]
    problem = Problem(layers=layers, machine=machine(device_bytes=600))
    assert problem.fits and plan_activations(problem).peak_bytes == 600
    without = [*layers[:2], block("c", 1.0, 100)]
    assert plan_activations(Problem(layers=without, machine=machine(device_bytes=550))).peak_bytes == 550
