"""What a plan reports, and how a run that is resumed goes on with it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.planning_tools import (
    BEST,
    World,
    decided,
    planning_in,
    run_epoch,
    slower_link,
    truth,
)

from hapi.errors import ConfigError
from hapi.profiler.change import Change
from hapi.profiler.profile import Profile
from hapi.profiler.strategies import PLANNERS


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
        {"other_split": 5, "other_share": 0.5}, {"other_split": 0}, {"other_split": 0, "other_share": 0.75},
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
