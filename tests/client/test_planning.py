"""The plan while training runs: schedules, decisions, re-planning without flapping, memory, resuming."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_tools import JOB, MB, World, planning_in, run_epoch, sizes_in, truth

from hapi.client.planning.controller import ORACLE_BATCHES, SplitController
from hapi.client.planning.link_probe import LinkProbe
from hapi.client.planning.plan_records import Change
from hapi.client.planning.split_range import SplitRange, first_that_fits, received_ahead
from hapi.errors import ConfigError, DeviceMemoryError
from hapi.profiler.cost import estimate, memory
from hapi.profiler.fit import ENOUGH_BYTES
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import PLANNERS, plan

FREEZE, BEST = 4, 3
"""Of :func:`truth`: at 100 Mbit/s split 3 is the fastest, below 45 Mbit/s the freeze."""


def best_of(world: World, job: Job = JOB) -> int:
    return plan("auto", world.true, job).split


def slower_link(world: World, factor: float) -> None:
    link = world.true.link
    world.true = replace(world.true, link=replace(link, bits_per_second=link.bits_per_second * factor))


def decided(bits: float = 100e6, **options: Any) -> tuple[SplitController, World]:
    """A planning after its profiling epoch."""
    world = World(truth(bits))
    planning = planning_in(world, **options)
    run_epoch(planning, world)
    return planning, world


def knows_the_truth(planning: SplitController, world: World) -> None:
    """Of the seconds of both sides, and so the best split."""
    found = planning.profile
    assert found is not None
    assert found.step_seconds == pytest.approx(world.true.step_seconds)
    for layer, true in zip(found.layers[:FREEZE], world.true.layers, strict=False):
        assert layer.client_seconds == pytest.approx(true.client_seconds)
        assert layer.server_seconds == pytest.approx(true.server_seconds)
    assert planning.plan is not None and planning.plan.split == BEST


# -- the profiling epoch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "splits"),
    [(1, [4]), (2, [4, 0]), (3, [4, 0, 0]), (10, [4] * 5 + [0] * 5)],
)
@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
def test_half_at_the_freeze_half_at_the_earliest(batches: int, splits: list[int], ahead: int) -> None:
    world = World(truth())
    assert run_epoch(planning_in(world), world, batches=batches, ahead=ahead) == splits


def test_some_batches_at_a_split_are_timed_and_not_its_first() -> None:
    planning = planning_in(World(truth()))
    planning.begin_pass(0, 10)
    timed = [planning.open(0, batch)[1] for batch in range(10)]
    assert timed == [False, True, False, True, False] * 2
    planning = planning_in(World(truth()))
    planning.begin_pass(0, 20)
    timed = [planning.open(0, batch)[1] for batch in range(20)]
    assert timed == [False, True, False, True, False, True, False, False, False, False] * 2
    planning = planning_in(World(truth()))
    planning.begin_pass(0, 2)
    assert [planning.open(0, batch) for batch in range(2)] == [
        (4, True),
        (0, True),
    ]  # the only ones there are


@pytest.mark.parametrize("slow", [{0, 1}, {1, 4}, {5, 6}, {6, 8}, {0, 2, 3, 7}])
def test_a_few_batches_that_the_client_takes_longer_for_do_not_count(slow: set[int]) -> None:
    """For whatever reason, as long as they are few."""
    world = World(truth())
    planning = planning_in(world)

    def before(batch: int) -> None:
        world.slower = 9.0 if batch in slow else 1.0

    run_epoch(planning, world, before=before)
    knows_the_truth(planning, world)


def test_a_machine_that_is_slower_half_of_the_time_counts_with_its_mean() -> None:
    """Of the batches that were not timed layer by layer: 0, 2 and 4 at the freeze, 7 and 9 at split 0."""
    world = World(truth())
    planning = planning_in(world)

    def before(batch: int) -> None:
        world.slower = world.server_slower = 1.5 if batch in (0, 3, 4, 7, 8) else 1.0

    run_epoch(planning, world, before=before)
    assert planning.profile is not None
    for layer, true in zip(planning.profile.layers[:FREEZE], world.true.layers, strict=False):
        assert layer.client_seconds == pytest.approx(1.25 * true.client_seconds)
        assert layer.server_seconds == pytest.approx((1.5 + 1.0 + 1.5) / 3 * true.server_seconds)


@pytest.mark.parametrize("pages", [0, 10, 400])
@pytest.mark.parametrize("new", [{1, 2, 3, 6, 7, 8}, {1, 2, 4, 6, 7, 9}])
def test_batches_that_take_new_memory_do_not_count(new: set[int], pages: int) -> None:
    """However many they are: what touches memory for the first time takes longer, and later batches have it.

    ``pages``: those that every batch touches anew, as where the C library gives freed memory back.
    """
    world = World(truth())
    planning = planning_in(world)

    def before(batch: int) -> None:
        world.slower, world.pages = (9.0, pages + 600) if batch in new else (1.0, pages + batch)

    run_epoch(planning, world, before=before)
    knows_the_truth(planning, world)


@pytest.mark.parametrize("pages", [0, 10, 400])
@pytest.mark.parametrize("new", [{0, 1}, {0, 3, 4}, {0, 2, 3, 4}])
def test_requests_for_which_a_server_took_new_memory_do_not_count(new: set[int], pages: int) -> None:
    """One of two that are timed layer by layer among them."""
    world = World(truth())
    planning = planning_in(world)

    def before(batch: int) -> None:
        took = batch in new
        world.server_slower, world.server_pages = (9.0, pages + 600) if took else (1.0, pages + batch)

    run_epoch(planning, world, before=before)
    knows_the_truth(planning, world)


def test_servers_that_share_the_work_count_as_one_that_does_it_alone() -> None:
    world = World(truth())
    world.count = 2
    planning = planning_in(world)
    run_epoch(planning, world)
    assert planning.profile is not None
    seconds = [layer.server_seconds for layer in planning.profile.layers[:FREEZE]]
    assert seconds == pytest.approx([layer.server_seconds / 2 for layer in world.true.layers[:FREEZE]])


def test_a_server_that_takes_new_memory_for_every_request_has_the_price_of_that() -> None:
    world = World(truth())
    planning = planning_in(world)
    world.server_slower, world.server_pages = 3.0, 600
    run_epoch(planning, world)
    assert planning.profile is not None
    seconds = [layer.server_seconds for layer in planning.profile.layers]
    assert seconds == pytest.approx([3 * layer.server_seconds for layer in world.true.layers])


def test_the_step_is_the_same_at_every_split() -> None:
    """All batches of one split took new memory."""
    world = World(truth())
    planning = planning_in(world)

    def before(batch: int) -> None:
        world.slower, world.pages = (9.0, 600) if batch < 5 else (1.0, 0)

    run_epoch(planning, world, before=before)
    assert planning.profile is not None
    assert planning.profile.step_seconds == pytest.approx(world.true.step_seconds)


@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
def test_the_decision_is_that_of_the_true_costs(ahead: int) -> None:
    for bits in (20e6, 100e6, 1e9):
        world = World(truth(bits))
        planning = planning_in(world)
        run_epoch(planning, world, ahead=ahead)
        assert planning.split == best_of(world)
        assert run_epoch(planning, world, 1) == [planning.split] * 10
        (change,) = planning.changes
        assert change == Change(epoch=1, batch=0, before=4, after=planning.split, why="profiled")
        seconds = estimate(world.true, JOB, planning.split).epoch_seconds
        assert planning.estimated_seconds(0, JOB.samples) == pytest.approx(seconds, rel=1e-6)


def test_a_sample_cache_that_fills_brings_the_split_to_zero() -> None:
    """At 10 Mbit/s stored samples are slower than features; they are not once they need not cross."""
    world, part = World(truth(10e6, here=0.0005)), [0.0]
    planning = planning_in(world, cached=lambda epoch: (part[0], part[0]))
    run_epoch(planning, world)
    deep = planning.split
    assert deep > 0 == planning.job.cached
    assert run_epoch(planning, world, 1) == [deep] * 10
    part[0] = 0.95
    seconds = planning.estimated_seconds(2, JOB.samples)
    assert run_epoch(planning, world, 2) == [0] * 10
    assert planning.changes[-1].before == deep and planning.changes[-1].epoch == 2
    assert "the sample cache has 95% of the samples" in planning.changes[-1].why
    assert planning.estimated_seconds(2, JOB.samples) < seconds
    assert planning.to_json()["job"]["cached"] == 0.95
    planning = planning_in(world, cached=lambda epoch: (0.95, 0.95), profile=world.true)
    assert planning.split == 0


def test_what_later_epochs_gain_counts() -> None:
    """None of the samples is here yet; the first epoch at split 0 is dearer, and pays for those that follow."""
    world = World(truth(10e6, here=0.0005))
    for left, split in ((1.0, 0), (0.0, best_of(world))):
        planning = planning_in(world, cached=lambda epoch, left=left: (0.0, left), profile=world.true)  # type: ignore[misc]
        assert planning.split == split


@pytest.mark.parametrize("strategy", ["hapi", "nsg", "bandwidth"])
def test_every_strategy_decides_as_it_would_from_the_truth(strategy: str) -> None:
    for bits in (20e6, 100e6, 1e9):
        world = World(truth(bits))
        planning = planning_in(world, strategy)
        run_epoch(planning, world)
        assert planning.split == plan(strategy, world.true, JOB).split


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_number_of_batches_is_profiled_at_each_split(ahead: int) -> None:
    world = World(truth())
    planning = planning_in(world, profile_batches=2)
    splits = run_epoch(planning, world, ahead=ahead)
    decided_at = 4 + ahead  # what had opened before the decision stays as it was
    assert splits == [4, 4, 0, 0, *[4] * ahead, *[BEST] * (10 - decided_at)]
    assert planning.changes[0].batch == decided_at, "the first batch that is extracted at the new split"


def test_an_epoch_of_one_batch_takes_two_epochs_to_profile() -> None:
    world = World(truth())
    planning = planning_in(world)
    assert run_epoch(planning, world, 0, batches=1) == [4]
    assert planning.plan is None and planning.profiling
    assert run_epoch(planning, world, 1, batches=1) == [0]
    assert planning.plan is not None
    assert run_epoch(planning, world, 2, batches=1) == [BEST]


def test_profiling_that_takes_longer_than_an_epoch_goes_on_in_the_next() -> None:
    world = World(truth())
    planning = planning_in(world, profile_batches=8)
    assert run_epoch(planning, world, 0) == [4] * 8 + [0] * 2
    assert run_epoch(planning, world, 1, ahead=0) == [0] * 6 + [BEST] * 4


def test_other_epochs_can_be_profiled() -> None:
    world = World(truth())
    planning = planning_in(world, profile_epochs=(0, 2), profile_batches=1)
    assert run_epoch(planning, world, 0, ahead=0)[:3] == [4, 0, BEST]
    assert run_epoch(planning, world, 1) == [BEST] * 10
    slower_link(world, 0.3)
    assert run_epoch(planning, world, 2, ahead=0) == [4, 0, *[4] * 8]
    assert run_epoch(planning, world, 3) == [4] * 10


def test_without_epoch_0_among_them_it_is_profiled_all_the_same() -> None:
    world = World(truth())
    planning = planning_in(world, profile_epochs=(2,))
    assert [len(set(run_epoch(planning, world, epoch))) for epoch in range(4)] == [2, 1, 2, 1]


def test_a_pass_that_is_left_in_its_middle_is_profiled_again() -> None:
    """What had opened and was not worked on comes once more: the loop was left, or a batch did not fit."""
    world = World(truth())
    planning = planning_in(world)
    planning.begin_pass(0, 4)
    opened = [planning.open(0, batch) for batch in range(3)]
    planning.batch_done(0, 0, opened[0][0], world.batch(4))
    assert run_epoch(planning, world, 0, batches=3) == [4, 0, 0]
    assert planning.plan is not None


def test_the_pipelines_bursts_do_not_end_profiling_early() -> None:
    """A window that opens all batches of the epoch at once, and then all of the next."""
    world = World(truth())
    planning = planning_in(world, profile_batches=2)
    assert run_epoch(planning, world, 0, ahead=100) == [4, 4, 0, 0, *[4] * 6]
    assert planning.changes[0].batch == 4  # until a batch opens at it
    run_epoch(planning, world, 1)
    assert (planning.changes[0].epoch, planning.changes[0].batch) == (1, 0)


def test_noise_leads_to_no_bad_decision() -> None:
    for seed in range(20):
        source, world = Random(seed), World(truth())
        world.noise = lambda source=source: source.uniform(0.92, 1.08)  # type: ignore[misc]
        planning = planning_in(world)
        run_epoch(planning, world)
        chosen = estimate(world.true, JOB, planning.split).epoch_seconds
        assert chosen <= 1.1 * estimate(world.true, JOB, best_of(world)).epoch_seconds


# -- the oracle ----------------------------------------------------------------------------------------------------


def test_the_oracle_tries_every_split(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = World(truth()), 0.0
    planning = planning_in(world, "oracle")
    monkeypatch.setattr("hapi.client.planning.controller.time.monotonic", lambda: now)

    def runs(batch: int) -> None:
        nonlocal now
        now += [5.0, 3.0, 1.0, 2.0, 4.0][min(batch // 3, 4)] + (10.0 if batch % 3 == 0 else 0.0)

    splits = run_epoch(planning, world, batches=18, ahead=0, before=runs)
    assert splits == [s for s in range(5) for _ in range(ORACLE_BATCHES)] + [2] * 3
    assert planning.measured == {0: 5.0, 1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    slower_link(world, 0.01)
    assert set(run_epoch(planning, world, 1)) == {2}, "the oracle does not re-plan"
    assert planning.to_json()["measured_batch_seconds"]["2"] == 1.0


def test_the_oracle_with_few_batches_goes_on_over_epochs() -> None:
    world = World(truth())
    planning = planning_in(world, "oracle")
    splits = [s for epoch in range(5) for s in run_epoch(planning, world, epoch, batches=4)]
    assert splits[:15] == [s for s in range(5) for _ in range(ORACLE_BATCHES)]
    assert planning.plan is not None and not planning.profiling


def test_the_oracle_goes_below_no_split_that_failed() -> None:
    world = World(truth())
    planning = planning_in(world, "oracle")
    planning.begin_pass(0, 20)
    planning.batch_done(0, 0, planning.open(0, 0)[0], world.batch(0))
    assert planning.failed(0, 1, 0)
    run_epoch(planning, world, 0, batches=30)
    assert planning.split >= 1 and 0 in planning.measured


# -- a given profile -----------------------------------------------------------------------------------------------


def test_a_given_profile_stands_in_for_epoch_0() -> None:
    world = World(truth())
    planning = planning_in(world, profile=truth())
    assert planning.split == BEST and not planning.profiling
    assert run_epoch(planning, world) == [BEST] * 10
    assert planning.changes == [Change(epoch=0, batch=0, before=4, after=BEST, why="from the given profile")]


def test_a_given_profile_is_followed_by_the_epochs_that_are_asked_for() -> None:
    world = World(truth())
    planning = planning_in(world, profile=truth(), profile_epochs=(0, 2))
    assert [len(set(run_epoch(planning, world, epoch))) for epoch in range(4)] == [1, 1, 2, 1]


def test_a_given_profile_that_is_wrong_is_noticed() -> None:
    world = World(truth(20e6))
    planning = planning_in(world, profile=truth(100e6))
    splits = run_epoch(planning, world, ahead=0)
    assert splits[0] == BEST and splits[-1] == 4


def test_a_given_profile_takes_this_jobs_bytes() -> None:
    other = replace(truth(), samples=replace(truth().samples, stored_bytes=1))
    planning = planning_in(World(truth()), profile=other)
    assert planning.profile is not None and planning.profile.samples.stored_bytes == 40_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"freeze": 3}, "it has 5 layers, freeze 3"),
        ({"freeze": 3, "last_split": 3}, "it has 5 layers, freeze 3"),
        ({"layers": truth().layers[:4]}, "it has 4 layers, freeze 4"),
        ({"layers": (replace(truth().layers[0], name="other"), *truth().layers[1:])}, "its layer 'other' differs"),
        ({"layers": (replace(truth().layers[0], output_bytes=7), *truth().layers[1:])}, "'layer1' differs"),
    ],
)  # fmt: skip
def test_a_profile_of_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        planning_in(World(truth()), profile=replace(truth(), **change))
    assert "\n" not in str(caught.value)


def test_a_profile_of_another_kind_of_device_is_refused() -> None:
    other = replace(truth(), client_tier=replace(truth().client_tier, device="cuda"))
    with pytest.raises(
        ConfigError, match="measured with the client on cuda, this one is on cpu; measure anew"
    ):
        planning_in(World(truth()), profile=other)


def test_a_head_of_another_size_is_no_other_model() -> None:
    """The trained layers depend on the number of classes, which no measurement of the frozen ones does."""
    head = replace(truth().layers[4], output_bytes=9, parameter_bytes=1)
    planning = planning_in(World(truth()), profile=replace(truth(), layers=(*truth().layers[:4], head)))
    assert planning.split == BEST


# -- the watch over the plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_slower_link_moves_the_split_and_a_faster_one_moves_it_back(ahead: int) -> None:
    planning, world = decided()
    run_epoch(planning, world, 1)

    def at_5(factor: float) -> Any:
        return lambda batch: slower_link(world, factor) if batch == 5 else None

    splits = run_epoch(planning, world, 2, batches=12, ahead=ahead, before=at_5(0.3))
    # Two batches of evidence (5 and 6), and what had opened before.
    assert splits == [BEST] * (7 + ahead) + [4] * (5 - ahead)
    splits = run_epoch(planning, world, 3, batches=12, ahead=ahead, before=at_5(1 / 0.3))
    assert splits == [4] * (7 + ahead) + [BEST] * (5 - ahead)
    down, up = planning.changes[1:]
    assert (down.epoch, down.batch, down.before, down.after) == (2, 7 + ahead, BEST, 4)
    assert re.fullmatch(
        r"bandwidth is 30\.0 Mbit/s, the plan had 100\.0 Mbit/s; \d+% faster by estimate", down.why
    )
    assert (up.epoch, up.batch, up.before, up.after) == (3, 7 + ahead, 4, BEST)


def test_replan_off_stays() -> None:
    planning, world = decided(replan=False)
    slower_link(world, 0.01)
    assert run_epoch(planning, world, 1) == [BEST] * 10 == run_epoch(planning, world, 2)
    assert len(planning.changes) == 1


def test_a_small_gain_is_not_worth_a_change() -> None:
    planning, world = decided()
    slower_link(world, 0.49)  # split 4 becomes the fastest, by less than 5%
    before, after = (estimate(world.true, JOB, s).epoch_seconds for s in (BEST, 4))
    assert 0.95 < after / before < 1
    assert run_epoch(planning, world, 1, batches=30) == [BEST] * 30


def test_another_tenant_and_slower_tiers_move_the_split() -> None:
    planning, world = decided(1e9)
    start = planning.split
    world.share = 0.5
    run_epoch(planning, world, 1)
    assert planning.split < start, "less of the server: more is done here"
    planning, world = decided(1e9)
    layers = tuple(replace(x, client_seconds=x.client_seconds * 8) for x in world.true.layers)
    world.true = replace(world.true, layers=layers)
    run_epoch(planning, world, 1)
    assert planning.split > start, "a slower client: more is done there"


pace = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@settings(max_examples=40)
@given(pace, st.sampled_from([0.1, 0.3]), st.integers(0, 3))
def test_the_split_never_flaps(times: list[int], factor: float, ahead: int) -> None:
    """A link that goes to and fro, staying for as long as ``times`` says: the split follows ever more rarely."""
    planning, world = decided()
    slow, left, turns = False, times[0], iter([*times[1:], *[10**9]])

    def step(batch: int) -> None:
        nonlocal slow, left
        if left == 0:
            slow, left = not slow, next(turns)
            slower_link(world, factor if slow else 1 / factor)
        left -= 1

    batches = sum(times) + 5
    run_epoch(planning, world, 1, batches=batches, ahead=ahead, before=step)
    changes = planning.changes[1:]
    back = [b.batch - a.batch for a, b in pairwise(changes) if b.after < b.before]
    assert all(held >= SplitController.FIRST_HOLD - ahead for held in back), (
        "to where a fast link is hoped for"
    )
    if max(times) < 2:
        assert len(changes) <= 1, "two batches that agree come only in the end"
    if all(t <= 3 for t in times):  # nothing ever stays
        assert len(changes) <= 2 + math.log2(1 + batches) + batches / SplitController.LONGEST_HOLD
    # In the end the link stays: so does the split, after the longest hold, where the truth has it.
    run_epoch(planning, world, 2, batches=SplitController.LONGEST_HOLD + 10, ahead=0)
    seconds = [estimate(world.true, JOB, s).epoch_seconds for s in range(5)]
    assert seconds[planning.split] <= min(seconds) * 1.06
    settled = len(planning.changes)
    run_epoch(planning, world, 3, batches=50)
    assert len(planning.changes) == settled


@pytest.mark.parametrize("bucket", [300e3, 2e6])
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_link_that_is_fast_for_little_is_tried_ever_more_rarely(bucket: float, ahead: int) -> None:
    """A token bucket: what is sent after a pause comes at 100 Mbit/s, and the link goes on with 10.

    Of split 4 a batch is 200 kB in 190 ms, which the bucket makes up for; of the split that is best on a faster link
    more than goes through. What looks like a faster link there is none.
    """
    planning, world = decided(10e6)
    run_epoch(planning, world, 1)
    assert planning.split == 4
    tokens = bucket

    def batch(split: int, **options: Any) -> list[tuple[int, float]]:
        nonlocal tokens
        nbytes = original(split, **options)[0][0]
        fast = min(nbytes, tokens)
        seconds = fast * 8 / 100e6 + (nbytes - fast) * 8 / 10e6
        passed = max(seconds, estimate(world.true, JOB, 4).epoch_seconds / JOB.samples * 10)
        tokens = min(bucket, tokens - fast + passed * 10e6 / 8)
        return [(nbytes, seconds)]

    original, world.batch = world.batch, batch  # type: ignore[method-assign]
    splits = run_epoch(planning, world, 2, batches=3000, ahead=ahead)
    elsewhere = sum(split != 4 for split in splits)
    assert 1 <= len(planning.changes[1:]) <= 16
    assert elsewhere <= 0.06 * len(splits)
    assert sum(split != 4 for split in splits[-1000:]) <= 0.03 * 1000


def unseen_at_the_freeze(sent: int = 5_000) -> tuple[SplitController, World]:
    """Of split 4 ten samples, 50 kB, show nothing of a link; the plan was made when it was fast."""
    true = truth()
    deepest = replace(true.layers[3], output_bytes=sent)
    world = World(replace(true, layers=(*true.layers[:3], deepest, true.layers[4])))
    planning = planning_in(world)
    run_epoch(planning, world)
    assert planning.split == BEST
    return planning, world


def test_a_link_that_recovered_is_noticed_where_nothing_shows_it() -> None:
    planning, world = unseen_at_the_freeze(sent=1_000)
    slower_link(world, 0.1)
    assert run_epoch(planning, world, 1, batches=12)[-1] == 4
    slower_link(world, 10)
    splits = run_epoch(planning, world, 2, batches=40)
    assert splits[-1] == BEST and planning.looks == 2
    assert "bandwidth is 100.0 Mbit/s" in planning.changes[-1].why
    assert planning.to_json()["looks"] == 2


def test_short_arrivals_that_come_much_faster_are_a_reason_to_look_at_once() -> None:
    """After a hundred batches on a slow link the next look is up to 64 batches away."""
    planning, world = unseen_at_the_freeze()
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=100)
    slower_link(world, 10)
    splits = run_epoch(planning, world, 2, batches=10)
    assert splits[-1] == BEST, "two that hint, a look and another one, each after one that was open"
    assert splits.index(BEST) <= 7


def test_a_look_whose_answers_are_there_before_anybody_looks_is_followed_by_another() -> None:
    """A link that is faster than its readers shows in bounds only."""
    planning, world = unseen_at_the_freeze(sent=1_000)
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=12)
    slower_link(world, 10)
    planning.begin_pass(2, 60)
    splits = []
    for batch in range(60):
        splits.append(planning.open(2, batch)[0])
        arrivals = world.batch(splits[-1])
        planning.batch_done(2, batch, splits[-1], [(n // 10, s / 10) for n, s in arrivals], arrivals)
    assert splits[-1] == BEST and planning.looks == 2


LINK = 10e6


def short(megabits: float) -> list[tuple[int, float]]:
    """A batch's arrivals that are too short to tell a rate."""
    return [(27_000, 27_000 * 8 / (megabits * 1e6))] * 3 + [(1_000, 1e-6)]


def looks(look: LinkProbe, paces: list[float], bits: float = LINK) -> list[bool]:
    return [look.due(short(pace), bits) for pace in paces]


def test_a_hint_takes_two_batches_that_agree() -> None:
    assert looks(LinkProbe(), [11, 13, 10, 100, 11, 100]) == [False] * 6
    assert looks(LinkProbe(), [11, 10, 100, 100]) == [False] * 3 + [True]
    assert looks(LinkProbe(), [11, 15, 21, 26]) == [False] * 4, "not twice the fastest so far"


def test_what_was_a_false_hint_is_none_any_more() -> None:
    look = LinkProbe()
    assert looks(look, [10, 100, 100]) == [False, False, True]
    assert looks(look, [10, 100, 100, 190, 190, 10, 100]) == [False] * 7
    look.restart()
    assert looks(look, [10, 250, 250]) == [False, False, True]


def test_a_link_of_which_the_plan_has_another_rate_is_known_anew() -> None:
    look = LinkProbe()
    assert looks(look, [10, 10]) == [False, False]
    assert looks(look, [100, 100, 100], 10 * LINK) == [False] * 3
    assert looks(look, [10, 30, 30], LINK / 2) == [False, False, True]


def test_arrivals_of_one_piece_hint_at_nothing() -> None:
    look, tiny = LinkProbe(), [(8_000, 0.01)]
    assert not any(
        look.due(arrivals, LINK) for arrivals in (tiny, tiny, [(8_000, 1e-5)], [(8_000, 1e-5)], [])
    )


@settings(max_examples=60)
@given(st.lists(st.floats(0.5, 5000), min_size=1, max_size=200))
def test_false_hints_are_few(paces: list[float]) -> None:
    """Whatever comes, looks without a change of the plan are those by number of batches and one for each doubling."""
    look, made = LinkProbe(), 0
    for pace in paces:
        made += look.due(short(pace), LINK)
    assert made <= len(paces) // LinkProbe.LONGEST + math.log2(5000 / 0.5)


def test_a_look_sends_more_than_what_just_shows_a_link() -> None:
    """On a fast link a part of it is there before anybody looks, and a rest that is too small shows nothing."""
    _, world = unseen_at_the_freeze()
    slower_link(world, 0.1)
    samples = min(JOB.request_size, world.true.server.cos_batch)
    wide, just, large = world.true.layers[0], -(-ENOUGH_BYTES // samples), -(-2 * ENOUGH_BYTES // samples)
    layers = (
        replace(wide, output_bytes=4 * large),
        replace(world.true.layers[1], output_bytes=large),
        replace(world.true.layers[2], output_bytes=just),
        *world.true.layers[3:],
    )
    profile = replace(world.true, layers=layers, samples=replace(world.true.samples, stored_bytes=8 * large))
    assert profile.sent_bytes(3) * samples >= ENOUGH_BYTES and profile.sent_bytes(2) > profile.sent_bytes(3)
    assert LinkProbe().split("auto", profile, JOB, SplitRange(0, 4), 4) == 2


@pytest.mark.parametrize(("sent", "waits"), [(5_000, [64] * 10), (1_000, [8, 16, 32, *[64] * 10])])
def test_a_link_that_stays_slow_is_looked_at_ever_more_rarely(sent: int, waits: list[int]) -> None:
    """At first sooner where arrivals come in one piece, so that none can hint at another link."""
    planning, world = unseen_at_the_freeze(sent)
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=12)
    splits = run_epoch(planning, world, 2, batches=600)
    assert len(planning.changes) == 2 and planning.split == 4
    elsewhere = [s for s in splits if s != 4]
    assert elsewhere == [0] * planning.looks, "the split that sends least of those that show the link"
    assert planning.looks == sum(n < 600 for n in accumulate(waits))


def test_looks_that_take_long_are_rarer() -> None:
    """In the long run they take a fiftieth of all seconds, whatever one takes."""
    _, world = unseen_at_the_freeze()
    slower_link(world, 0.04)
    profile, look, looks, batches = world.true, LinkProbe(), 0, 20_000
    for _ in range(batches):
        if look.due([], profile.link.bits_per_second):
            at = look.split("auto", profile, JOB, SplitRange(0, 4), 4)
            assert at is not None
            looks += 1
    there, here = (estimate(profile, JOB, s).epoch_seconds for s in (at, 4))
    assert there > 4 * here
    first = [8 * 2**n for n in range(looks) if 8 * 2**n < (there / here - 1) / LinkProbe.SHARE]
    assert len(first) + 3 < looks
    assert (looks - len(first)) * (there / here - 1) <= LinkProbe.SHARE * (1 + batches - sum(first))


def test_a_link_that_shows_itself_or_does_not_matter_is_not_looked_at() -> None:
    planning, world = decided()
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=200)
    assert planning.split == 4 and planning.looks == 0, "100 kB a request show it"
    planning, world = unseen_at_the_freeze()
    layers = tuple(replace(x, client_seconds=x.client_seconds * 50) for x in world.true.layers)
    world.true = replace(world.true, layers=layers)
    run_epoch(planning, world, 1, batches=200)
    assert planning.split == 4 and planning.looks == 0, "no link makes it better to compute here"


@settings(max_examples=25)
@given(st.integers(0, 1 << 32), st.sampled_from([0.08, 0.2]))
def test_noise_never_moves_the_split(seed: int, noise: float) -> None:
    source = Random(seed)
    world = World(truth())
    world.noise = lambda: source.uniform(1 - noise, 1 + noise)
    planning = planning_in(world)
    run_epoch(planning, world)
    assert len(set(run_epoch(planning, world, 1, batches=60))) == 1
    assert len(planning.changes) == 1


# -- memory --------------------------------------------------------------------------------------------------------


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


@settings(max_examples=60)
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
    planning._schedule_again()
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


def test_the_report_is_json_and_holds_every_candidate() -> None:
    planning, _ = decided()
    document = json.loads(json.dumps(planning.to_json()))
    assert document["strategy"] == "auto" and document["split"] == BEST
    assert [c["estimate"]["split"] for c in document["candidates"]] == [0, 1, 2, 3, 4]
    assert set(document["strategies"]) == set(PLANNERS) and document["strategies"]["freeze"] == 4
    assert document["changes"][0]["to"] == BEST
    assert Profile.from_json(document["profile"]) == planning.profile
    early = planning_in(World(truth()))
    assert "candidates" not in early.to_json() and early.estimated_seconds(0, 100) is None


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_resumed_run_goes_on_with_the_plan(ahead: int) -> None:
    planning, world = decided(profile_batches=1)
    state = json.loads(json.dumps(planning.state()))
    again = planning_in(world, profile_batches=1)
    again.restore(state, 0, 6)
    assert again.split == BEST and again.profile == planning.profile
    assert run_epoch(again, world, 0, first=6, ahead=ahead) == [BEST] * 4, "not profiled a second time"
    from_before = again.changes[: again.earlier_changes]
    assert from_before == planning.changes and len(from_before) == 1
    assert again.changes[1:] == [Change(epoch=0, batch=6, before=4, after=BEST, why="from the checkpoint")]


def test_a_run_that_is_resumed_while_profiling_profiles_the_rest() -> None:
    world = World(truth())
    planning = planning_in(world)
    planning.begin_pass(0, 10)
    assert planning.state() is None
    again = planning_in(world)
    again.restore(None, 0, 6)
    assert run_epoch(again, world, 0, first=6) == [4, 4, 0, 0]
    assert again.split == BEST


def test_a_later_profiling_epoch_that_was_interrupted_is_resumed() -> None:
    planning, world = decided(profile_epochs=(0, 2))
    again = planning_in(world, profile_epochs=(0, 2))
    again.restore(planning.state(), 2, 4)
    assert run_epoch(again, world, 2, first=4) == [4, 4, 4, 0, 0, 0]


def test_what_did_not_fit_is_remembered() -> None:
    planning, world = decided()
    planning.failed(1, 0, BEST)
    again = planning_in(world)
    again.restore(planning.state(), 1, 0)
    assert again.split == 4
    slower_link(world, 100.0)
    assert set(run_epoch(again, world, 1, batches=20)) == {4}


def test_resumed_with_another_strategy_it_decides_from_the_profile() -> None:
    planning, world = decided(strategy="hapi")
    planning.failed(1, 0, planning.split)
    again = planning_in(world, "auto")
    state = planning.state()
    assert state is not None
    state["min_split"] = 0
    again.restore(state, 1, 0)
    assert again.split == BEST


def test_resumed_on_another_kind_of_device_it_profiles_anew() -> None:
    planning, _ = decided()
    state = planning.state()
    assert state is not None
    state["profile"]["client_tier"]["device"] = "cuda"
    world = World(truth())
    again = planning_in(world)
    again.restore(state, 1, 0)
    assert again.plan is None
    assert run_epoch(again, world, 1) == [4] * 5 + [0] * 5 and again.split == BEST


@pytest.mark.parametrize(
    "damage",
    [
        {"split": 5}, {"split": -1}, {"split": True}, {"split": "3"}, {"min_split": 9}, {"profiled": [None]},
        {"profiled": 3}, {"profile": {}}, {"profile": None}, {"profile": replace(truth(), freeze=2).to_json()},
    ],
    ids=repr,
)  # fmt: skip
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    planning, world = decided()
    state = planning.state()
    assert state is not None
    again = planning_in(world)
    with pytest.raises((ValueError, TypeError, KeyError, ConfigError)):
        again.restore({**state, **damage}, 1, 0)
    for missing in state:
        with pytest.raises(KeyError):
            again.restore({k: v for k, v in state.items() if k != missing}, 1, 0)
