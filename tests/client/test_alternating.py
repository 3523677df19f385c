"""A plan of two splits whose batches alternate: how it is followed, kept, left and taken up again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import losses
from support.local_job import open_session, trainer_of
from support.planning_tools import FREEZE, JOB, World, planning_in, run_epoch, sizes_in, slower_link, truth

from hapi.client.joint.shared_plan import SharedPlan
from hapi.client.planning.controller import SplitController
from hapi.client.planning.profile_phase import ENOUGH_DONE
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.figures.html import page
from hapi.figures.reading import Run
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.facts import ReuseFacts, Storage
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.strategies import plan, seconds_at
from hapi.server.service import Service

BOTH = replace(JOB, alternate=True)


def alternating(bits: float = 20e6, **options: object) -> tuple[SplitController, World]:
    """A planning after its profiling epoch, on a link where the stored samples and the last layer send little."""
    world = World(truth(bits))
    planning = planning_in(world, job=BOTH, **options)
    run_epoch(planning, world)
    return planning, world


def test_batches_alternate_by_the_share_of_the_plan() -> None:
    planning, world = alternating()
    at = plan("auto", world.true, BOTH).alternation
    assert at is not None
    ran = Counter(run_epoch(planning, world, 1, batches=64))
    assert ran == {at.split: 64 - round(64 * at.share), at.other: round(64 * at.share)}
    assert planning.split == at.split and at.text in planning.changes[-1].why
    assert planning.estimated_seconds(1, JOB.samples) == pytest.approx(
        seconds_at(world.true, BOTH, at), rel=1e-6
    )


def test_the_next_split_is_named_ahead() -> None:
    """So that servers have its layers ready."""
    planning, world = alternating()
    at = plan("auto", world.true, BOTH).alternation
    assert at is not None and planning.upcoming == at.other


def test_the_report_has_both_splits() -> None:
    planning, world = alternating()
    at = plan("auto", world.true, BOTH).alternation
    document = planning.to_json()
    assert at is not None
    assert (document["split"], document["other_split"], document["other_share"]) == (
        at.split,
        at.other,
        at.share,
    )


def test_a_resumed_run_alternates_as_before() -> None:
    planning, world = alternating()
    before = run_epoch(planning, world, 1, batches=16)
    again = planning_in(world, job=BOTH)
    again.restore(planning.state(), 1, 0)
    assert Counter(run_epoch(again, world, 1, batches=16)) == Counter(before) and len(set(before)) == 2


def test_a_split_that_does_not_fit_ends_it() -> None:
    planning, world = alternating()
    at = plan("auto", world.true, BOTH).alternation
    assert at is not None
    early = min(at.split, at.other)
    assert planning.failed(1, 0, early)
    assert early not in run_epoch(planning, world, 1, batches=16)


def test_a_split_that_the_server_has_no_memory_for_ends_it() -> None:
    planning, world = alternating()
    at = plan("auto", world.true, BOTH).alternation
    assert at is not None
    late = max(at.split, at.other)
    assert planning.refused(1, 0, late)
    assert late not in run_epoch(planning, world, 1, batches=16)


def test_a_change_of_the_link_ends_it_and_begins_it_again() -> None:
    planning, world = alternating()
    slower_link(world, 0.02)
    run_epoch(planning, world, 1, batches=40)
    assert set(run_epoch(planning, world, 2, batches=40)) == {FREEZE}
    slower_link(world, 50)
    for epoch in range(3, 6):
        run_epoch(planning, world, epoch, batches=40)
    assert len(set(run_epoch(planning, world, 6, batches=40))) == 2


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.08))
def test_noise_never_changes_it(seed: int, noise: float) -> None:
    planning, world = alternating()
    source, changes = Random(seed), len(planning.changes)
    world.noise = lambda: source.gauss(1.0, noise)
    for epoch in range(1, 10):
        run_epoch(planning, world, epoch, batches=20)
    assert len(planning.changes) == changes


def test_what_is_kept_goes_with_it() -> None:
    """Epoch 0 fills the cache; batches that are missing alternate."""
    disk = Storage(bytes=10**12, read=1e9, write=1e9)
    reuse = ReuseChooser(lambda: ReuseFacts(client=disk))
    planning, world = alternating(reuse=reuse)
    assert planning.reuse is not None and planning.reuse.mode == "keep here"
    assert planning.reuse.alternation is not None
    assert len(set(run_epoch(planning, world, 1, batches=16))) == 2


# -- the profile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Let each reading of the planner's clock be two seconds after the one before."""
    clock = count(step=2.0)
    monkeypatch.setattr("hapi.client.planning.controller.time.monotonic", lambda: next(clock))
    return clock


@pytest.mark.usefixtures("two_seconds")
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_profile_s_batches_alternate_too(ahead: int) -> None:
    """Each split gets as many as show enough; what has opened by then stays at its split."""
    world = World(truth(20e6))
    planning = planning_in(world, job=BOTH)
    ran = run_epoch(planning, world, batches=40, ahead=ahead)
    assert ran[: 2 * ENOUGH_DONE + ahead] == ([FREEZE, 0] * 5)[: 2 * ENOUGH_DONE + ahead]
    (change,) = planning.changes
    assert change.batch == 2 * ENOUGH_DONE + ahead
    assert (
        planning.plan is not None and planning.plan.alternation == plan("auto", world.true, BOTH).alternation
    )


@pytest.mark.usefixtures("two_seconds")
@pytest.mark.parametrize("one_machine", [True, False])
def test_a_profile_in_two_halves(one_machine: bool) -> None:
    """Tiers that share processors would only get in each other's way; and a number of batches is what the user says."""
    world = World(truth(20e6))
    sizes = replace(sizes_in(world.true), one_machine=one_machine)
    planning = SplitController(
        "auto",
        sizes,
        BOTH,
        world,  # type: ignore[arg-type]
        profile_batches=None if one_machine else 4,
    )
    ran = run_epoch(planning, world, batches=40)
    assert ran[:8] == [FREEZE] * 4 + [0] * 4


# -- several ranks -------------------------------------------------------------------------------------------------


class _Board:
    """What the first rank publishes, as both see it."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.is_first = True

    def publish(self, state: Any) -> None:
        self.states.append(json.loads(json.dumps(state)))

    def published(self) -> tuple[int, Any]:
        return len(self.states), self.states[-1]


def test_ranks_follow_the_first_one_s_alternation() -> None:
    """Also where it changes and the profile does not, as when more is kept."""
    planning, world = alternating()
    board, other = _Board(), _Board()
    other.is_first, other.states = False, board.states
    first, second = SharedPlan(board), SharedPlan(other)  # type: ignore[arg-type]
    follower = planning_in(world, job=BOTH)
    for at in (planning.at, Alternation.only(planning.split), planning.at):
        planning.at = at
        first.exchange(planning, 1, 0)
        first.exchange(planning, 1, 1)
        second.exchange(follower, 1, 1)
        assert follower.at == at
    assert len(board.states) == 3


# -- whole jobs -----------------------------------------------------------------------------------------------------

LAST = 13


def train(service: Service, **changes: Any) -> dict[str, Any]:
    with open_session(service, **changes) as session:
        return trainer_of(session, **changes).run()


@pytest.mark.slow
def test_batches_of_two_splits_alternate(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a profile of two equal tiers whose work is all in one layer."""
    monkeypatch.setattr("hapi.client.job_context.share_processors", lambda servers: False)
    path = tmp_path / "profile.json"
    job = train(service, split="auto", epochs=1, save_profile=str(path))["plan"]["job"]
    known = Profile.load(str(path))
    first, *others = known.layers
    layers = (
        replace(first, server_seconds=0.1, client_seconds=0.1),
        *(replace(x, server_seconds=1e-6, client_seconds=1e-6) for x in others),
    )
    profile = replace(known, layers=layers, link=replace(known.link, bits_per_second=1e9, variation=0.0))
    at = plan("auto", profile, Job(**{**job, "alternate": True})).alternation
    assert at is not None and at.share > 0.25
    profile.save(str(path))
    options = {"split": "auto", "profile": str(path), "replan": "off"}
    reference = losses(train(service, split=LAST))
    report = train(service, alternate="on", **options)
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert (report["plan"]["split"], report["plan"]["other_split"]) == (at.split, at.other)
    assert at.text in report["plan"]["changes"][0]["why"]
    for entry in report["epochs"]:
        ran = dict(entry["splits"])
        assert ran.keys() == {at.split, at.other} and abs(ran[at.other] - 5 * at.share) < 1.5
        assert entry["estimated_seconds"] > 0
    assert at.text in page(Run.from_json(json.loads(json.dumps(report))))
    assert all(len(entry["splits"]) == 1 for entry in train(service, **options)["epochs"])
