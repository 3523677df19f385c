"""Options of a run that goes on after a kill are those of the committed step, with a scheduler or without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import groups_of, offloaded, plain, tied_model, weights_equal
from torch import nn
from torch.optim import lr_scheduler

from hapi.errors import UsageError
from hapi.offload.states.group_options import ROOM_OF_A_GROUP, options_room, pack_options, restore_options

STEPS, KILLED_AT = 10, 4
pytestmark = pytest.mark.filterwarnings("error")

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "warm-up by function": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 6)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 7)], [3]
    ),
    "steps": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)], optimizer=o
    ),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, step_size_up=3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), **{"lr": 1e-2, **more})


def scheduled(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        plain(model, optimizer, step)
        scheduler.step()


def undisturbed(make: Callable[[Any], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tied_model()
    optimizer = adamw(model)
    scheduled(model, optimizer, make(optimizer), range(STEPS))
    return model, optimizer


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_that_is_moved_on_comes_to_the_same_weights(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = SCHEDULERS[kind]
    model, optimizer = undisturbed(make)
    first = tied_model()
    killed = offloaded(first, adamw(first), tmp_path)
    scheduled(first, killed, make(killed), range(KILLED_AT))
    killed.close(remove=False)
    twin = tied_model()
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        assert "for _ in range(optimizer.steps): scheduler.step()" in caplog.text
        scheduler = make(moved)
        for _ in range(moved.steps):
            scheduler.step()
        scheduled(twin, moved, scheduler, range(moved.steps, STEPS))
        assert weights_equal(model, twin)
        assert moved.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_scheduler_that_was_made_before_is_moved_on_too(tmp_path: Path) -> None:
    make = SCHEDULERS["warm-up then cosine"]
    model, _ = undisturbed(make)
    for steps in (KILLED_AT, STEPS):
        twin = tied_model()
        inner = adamw(twin)
        scheduler = make(inner)
        moved = offloaded(twin, inner, tmp_path)
        for _ in range(moved.steps):
            scheduler.step()
        scheduled(twin, moved, scheduler, range(moved.steps, steps))
        moved.close(remove=False)
    assert weights_equal(model, twin)


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_options_that_a_loop_changes_itself_go_on(
    rate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
                group["weight_decay"] += 0.01
                group["betas"] = (0.9 - step / 100, 0.99)
            plain(model, optimizer, step)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{**group, "lr": rate} for group in groups_of(model)])

    model = tied_model()
    changed(model, make(model), range(STEPS))
    for steps in (KILLED_AT, STEPS):
        twin = tied_model()
        moved = offloaded(twin, make(twin), tmp_path)
        changed(twin, moved, range(moved.steps, steps))
        moved.close(remove=False)
    assert weights_equal(model, twin)
    assert "scheduler" not in caplog.text


def test_other_groups_are_another_job(tmp_path: Path) -> None:
    model = tied_model()
    moved = offloaded(model, adamw(model), tmp_path)
    scheduled(model, moved, SCHEDULERS["steps"](moved), range(2))
    moved.close(remove=False)
    again = tied_model()
    with pytest.raises(UsageError, match="holds the states of another job"):
        offloaded(again, torch.optim.AdamW([p for g in groups_of(again) for p in g["params"]]), tmp_path)


def test_what_is_no_number_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    before: list[dict[str, Any]] = [
        {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "name": "head", "amsgrad": False, "foreach": None}
    ]
    packed = pack_options(before)
    assert len(packed) == options_room(before) == options_room([{"lr": 5}])
    group: dict[str, Any] = {**before[0], "lr": 7.0, "betas": (0.0, 0.0), "name": "other", "foreach": True}
    assert not restore_options(packed + b"more", [group])
    assert group == {**before[0], "name": "other", "foreach": True}
    many = [{"lr": 0.1, **{f"option {number}": 0.1 for number in range(ROOM_OF_A_GROUP)}}]
    assert len(pack_options(many)) == options_room(many)
    given = [{"lr": 3.0}]
    assert not restore_options(pack_options(many), given) and given == [{"lr": 3.0}]
    assert "more options than a commit holds" in caplog.text
