"""The plan while training runs: schedules, decisions, re-planning without flapping, memory, resuming."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.planning_tools import (
    BEST,
    FREEZE,
    JOB,
    World,
    best_of,
    knows_the_truth,
    planning_in,
    run_epoch,
    slower_link,
    truth,
)

from hapi.client.planning.controller import SplitController
from hapi.client.planning.profile_phase import ORACLE_BATCHES
from hapi.errors import ConfigError
from hapi.profiler.change import Change
from hapi.profiler.cost import estimate
from hapi.profiler.strategies import plan


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


class _Clock:
    """A clock that stands until a batch has taken its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hapi.client.planning.controller.time.monotonic", lambda: self.now)

    def epoch_of(
        self, world: World, seconds: float, *, batches: int, ahead: int, **options: Any
    ) -> tuple[list[int], SplitController]:
        """The splits of an epoch's batches, each of which takes ``seconds``, and the planning after it."""
        planning = planning_in(world, **options)

        def wait(batch: int) -> None:
            self.now += seconds

        return run_epoch(planning, world, batches=batches, ahead=ahead, before=wait), planning


@pytest.mark.parametrize(
    ("seconds", "ahead", "late", "early", "undecided"),
    [(2.0, 0, 4, 4, 0), (2.0, 1, 4, 4, 0), (2.0, 4, 6, 6, 1), (0.25, 0, 5, 5, 0), (0.25, 4, 6, 6, 3)],
)
def test_auto_leaves_a_split_that_has_shown_enough(
    monkeypatch: pytest.MonkeyPatch, seconds: float, ahead: int, late: int, early: int, undecided: int
) -> None:
    world = World(truth())
    splits, planning = _Clock(monkeypatch).epoch_of(world, seconds, batches=40, ahead=ahead)
    profiled = [FREEZE] * late + [0] * early + [FREEZE] * undecided
    assert splits == profiled + [BEST] * (40 - len(profiled))
    assert planning.changes[0].batch == len(profiled)
    knows_the_truth(planning, world)


@pytest.mark.parametrize(("request_size", "most"), [(5, 3), (4, 3), (10, 5), (128, 5), (1, 2)])
def test_few_batches_open_ahead_of_a_profile_that_ends_early(request_size: int, most: int) -> None:
    """As many as four requests are for, and the one that is trained."""
    job = replace(JOB, request_size=request_size, in_flight=4)
    world = World(truth())
    planning = planning_in(world, job=job)
    planning.begin_pass(0, 10)
    assert [planning.may_open(live) for live in range(7)] == [live < most for live in range(7)]
    run_epoch(planning, world)
    assert planning.may_open(1000)
    by_the_paper = planning_in(world, "hapi", job)
    by_the_paper.begin_pass(0, 10)
    assert by_the_paper.may_open(1000)


def test_batches_of_milliseconds_are_profiled_for_half_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    splits, _ = _Clock(monkeypatch).epoch_of(World(truth()), 0.01, batches=40, ahead=4)
    assert splits == [FREEZE] * 20 + [0] * 20


@pytest.mark.parametrize("options", [{"strategy": "hapi"}, {"profile_batches": 20}])
def test_the_papers_algorithm_and_a_given_number_profile_as_many_as_they_say(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    splits, _ = _Clock(monkeypatch).epoch_of(World(truth()), 2.0, batches=40, ahead=4, **options)
    assert splits == [FREEZE] * 20 + [0] * 20


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


def test_the_late_split_that_sends_least_is_profiled() -> None:
    """Pooling after the freeze sends a fifth of the bytes; the paper's algorithm profiles at the freeze."""
    true = truth(freeze=3, last_split=4)
    world = World(true)
    assert run_epoch(planning_in(world), world) == [4] * 5 + [0] * 5
    sent = world.counts[4].traffic.bytes_received
    assert sent == 5 * JOB.bs * true.sent_bytes(4) and true.sent_bytes(3) == 5 * true.sent_bytes(4)
    for strategy in ("hapi", "nsg", "bandwidth"):
        world = World(true)
        assert run_epoch(planning_in(world, strategy), world) == [3] * 5 + [0] * 5
        assert world.counts[3].traffic.bytes_received == 5 * sent
    larger = replace(true.layers[3], output_bytes=300_000)
    world = World(replace(true, layers=(*true.layers[:3], larger, true.layers[4])))
    assert run_epoch(planning_in(world), world)[0] == 3, "what sends more is not profiled"
