"""A plan within the memory of both sides: what does not fit is never run, and what failed is left."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning_tools import (
    BEST,
    FREEZE,
    JOB,
    MB,
    World,
    decided,
    planning_in,
    run_epoch,
    sizes_in,
    slower_link,
    truth,
)

from hapi.client.planning.split_range import SplitRange, first_that_fits, received_ahead
from hapi.errors import DeviceMemoryError
from hapi.profiler.cost import memory
from hapi.profiler.profile import Job
from hapi.profiler.strategies import plan


def peak(split: int, job: Job = JOB) -> int:
    return memory(truth(), job, split).peak


def with_memory(nbytes: int | None, **changes: Any) -> Job:
    return replace(JOB, memory_bytes=nbytes, prefetch_bytes=0, **changes)


LEAN = with_memory(None)


def test_the_budget_decides_the_earliest_split() -> None:
    peaks = [peak(s, LEAN) for s in range(5)]
    for nbytes in sorted(set(peaks)):
        job = with_memory(nbytes)
        first = next(s for s in range(5) if memory(truth(), job, s).peak <= nbytes)
        world = World(truth())
        planning = planning_in(world, job=job)
        splits = run_epoch(planning, world)
        assert splits == [max(4, first)] * 5 + [first] * 5
        for epoch in (1, 2):
            for split in run_epoch(planning, world, epoch):
                assert memory(truth(), job, split).peak <= nbytes


@given(st.integers(0, 40 * MB), st.sampled_from(["auto", "hapi", "nsg"]), st.floats(1e6, 1e10))
def test_no_split_that_does_not_fit_is_ever_run(nbytes: int, strategy: str, bits: float) -> None:
    """Not while the job is profiled either."""
    job, world = with_memory(max(1, nbytes)), World(truth(bits))
    fitting = [s for s in range(5) if memory(truth(), job, s).peak <= nbytes]
    try:
        planning = planning_in(world, strategy, job=job)
        splits = [*run_epoch(planning, world), *run_epoch(planning, world, 1)]
    except DeviceMemoryError as error:
        assert not fitting or strategy == "nsg"
        assert "no split fits the client's memory" in str(error)
        return
    assert set(splits) <= set(fitting)


def test_nothing_fits_says_what_would() -> None:
    smallest = min(peak(s, LEAN) for s in range(5))
    with pytest.raises(DeviceMemoryError) as caught:
        planning_in(World(truth()), job=with_memory(smallest - 1))
    message = str(caught.value)
    assert "\n" not in message
    assert f"no split fits the client's memory of {smallest - 1} bytes" in message
    assert "a training batch of 9 would fit (--bs), or raise --memory" in message
    with pytest.raises(DeviceMemoryError, match="not one sample would fit"):
        planning_in(World(truth()), job=with_memory(10))


def test_a_split_past_the_freeze_may_be_the_one_that_fits() -> None:
    """Its pooling runs on the server: less arrives here."""
    true = truth(freeze=3, last_split=4)
    job = with_memory(memory(true, LEAN, 4).peak)
    assert memory(true, job, 3).peak > job.memory_bytes  # type: ignore[operator]
    world = World(true)
    planning = planning_in(world, job=job)
    assert run_epoch(planning, world) == [4] * 10


def test_a_strategy_that_will_find_nothing_says_so_at_the_beginning() -> None:
    """Algorithm 1 looks no further than the freeze."""
    true = truth(freeze=3, last_split=4)
    job = with_memory(memory(true, LEAN, 4).peak)
    with pytest.raises(DeviceMemoryError, match="no split fits"):
        planning_in(World(true), "hapi", job=job)


def test_a_freeze_that_does_not_fit_is_not_profiled() -> None:
    """An early freeze whose output is larger than what is stored: the batches there may be too large for the client."""
    wide = truth(freeze=1, last_split=1)
    first = replace(wide.layers[0], output_bytes=100 * MB)
    wide = replace(wide, layers=(first, *wide.layers[1:]))
    job = with_memory(memory(wide, LEAN, 1).peak - 1)
    assert memory(wide, job, 0).peak <= (job.memory_bytes or 0)
    world = World(wide)
    assert run_epoch(planning_in(world, job=job), world) == [0] * 10


def test_weights_that_stay_count() -> None:
    """What the earliest split that fits brings here stays here when the split moves on."""
    for nbytes in sorted({peak(s, LEAN) for s in range(5)}):
        planning = planning_in(World(truth()), job=with_memory(nbytes))
        assert planning.job.weights_from == planning.weights_from


def test_what_is_received_ahead_leaves_the_memory_its_room() -> None:
    sizes, huge = sizes_in(truth()), 1 << 40
    free = replace(JOB, prefetch_bytes=huge)
    assert received_ahead(sizes, free, 0) == huge
    tight = replace(free, memory_bytes=60 * MB)
    ahead = received_ahead(sizes, tight, first_that_fits(sizes, tight))
    for split in range(5):
        m = memory(truth(), tight, split)
        if m.peak <= 60 * MB:
            assert m.peak - m.batches + ahead <= 60 * MB
    assert 0 < ahead < 60 * MB
    gpu = replace(sizes, client=replace(sizes.client, device="cuda"))
    assert received_ahead(gpu, tight, 0) == huge, "on a GPU they lie on the host"


def test_failing_moves_towards_the_freeze_and_never_below() -> None:
    planning, world = decided()
    for failing in range(BEST, FREEZE):
        assert planning.split == failing
        assert planning.failed(1, 2, failing)
        assert planning.split > failing
        assert planning.changes[-1].why == f"out of memory at split {failing}"
    assert planning.split == FREEZE and not planning.failed(1, 3, FREEZE)
    slower_link(world, 100.0)
    assert set(run_epoch(planning, world, 1, batches=40)) == {FREEZE}, "nothing re-plans to what failed"


def test_failing_chooses_among_what_fits() -> None:
    """After a failure at 2 the fastest of the later ones would be 3, which the budget does not hold."""
    true = truth(1e9)
    sizes = [x.output_bytes for x in true.layers]
    true = replace(true, layers=tuple(
        replace(x, output_bytes=9 * MB if i == 2 else sizes[i]) for i, x in enumerate(true.layers)
    ))  # fmt: skip
    job = with_memory(20 * MB + (48 << 20))  # what libraries and the client take on a CPU
    found = plan("auto", true, job)
    assert [c.fits for c in found.candidates] == [True, True, True, False, True]
    assert SplitRange(3, 4).best(found) == 4
    world = World(true)
    planning = planning_in(world, job=job)
    run_epoch(planning, world)
    assert planning.failed(1, 0, planning.split) and planning.split != 3


def test_what_a_server_has_no_memory_for_is_left_towards_this_side() -> None:
    planning, world = decided()
    assert planning.refused(1, 2, BEST) and planning.split < BEST
    assert planning.changes[-1].why == f"a server has no memory for split {BEST}"
    assert planning.refused(1, 2, BEST - 1) and planning.split < BEST - 1
    slower_link(world, 0.01)
    assert max(run_epoch(planning, world, 1, batches=40)) <= BEST - 2, "nothing re-plans to what was refused"
    assert planning.failed(1, 3, 0) and planning.split == 1
    assert not planning.refused(1, 3, 1) and not planning.failed(1, 3, 1), "nothing is left"


def test_being_refused_while_profiling_goes_on_one_earlier() -> None:
    """The server's device holds splits 0 and 1 only, but the first half is to be profiled at the freeze, 4."""
    world = World(truth())
    planning = planning_in(world)
    planning.begin_pass(0, 10)
    while (split := planning.open(0, 0)[0]) > 1:
        assert planning.refused(0, 0, split)
    assert [c.after for c in planning.changes] == [3, 2, 1]
    assert "no memory for split 4, profiling goes on from split 3" in planning.changes[0].why
    planning._reopen()
    assert run_epoch(planning, world, batches=10) == [1] * 5 + [0] * 5
    assert planning.split in (0, 1)
    other = planning_in(world)
    other.restore(json.loads(json.dumps(planning.state())), 1, 0)
    assert other.split == planning.split and other.open(1, 0)[0] <= 1


def test_failing_of_a_batch_that_opened_before_the_last_change() -> None:
    planning, _ = decided()
    changes = list(planning.changes)
    assert planning.failed(1, 0, 1) and planning.split == BEST
    assert planning.changes == changes


@pytest.mark.parametrize("ahead", [0, 3, 100])
def test_failing_while_profiling_goes_on_one_later(ahead: int) -> None:
    """Splits 0 and 1 do not fit although they should; every batch of the epoch is still profiled once."""
    world = World(truth())
    planning = planning_in(world)
    planning.begin_pass(0, 10)
    done, opened, failures = 0, [], 0
    splits = []
    while done < 10:
        while len(opened) < min(10 - done, 1 + ahead):
            opened.append(planning.open(0, done + len(opened)))
        split, timed = opened[0]
        if split < 2:
            failures += 1
            assert planning.failed(0, done, split)
            opened.clear()
            continue
        opened.pop(0)
        splits.append(split)
        planning.batch_done(0, done, split, world.batch(split, timed=timed))
        done += 1
    assert splits == [4] * 5 + [2] * 5 and failures == 2
    assert planning.plan is not None and planning.split == BEST
    assert [(c.before, c.after) for c in planning.changes] == [(0, 1), (1, 2), (4, 3)]
    assert planning.changes[0].why == "out of memory at split 0, profiling goes on from split 1"


# -- report and checkpoint -----------------------------------------------------------------------------------------
