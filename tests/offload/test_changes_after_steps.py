"""What a loop changes between a step and the next forward pass belongs to that step, also for a run after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import fork_server
from support.offload_loops import images_model, offloaded, plain, tied_model, train, weights_equal
from torch import nn

from hapi.offload.loop.values import ValueWatch
from hapi.offload.optimizer import OffloadedOptimizer

STEPS, KILLED = 8, 4
Change = Callable[[nn.Module], None]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def clamped(model: nn.Module) -> None:
    """As a critic's weights are, which no version tells."""
    for parameter in trained(model):
        parameter.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def shrunk(model: nn.Module) -> None:
    for parameter in trained(model):
        parameter.mul_(0.97)


@torch.no_grad()
def one_row(model: nn.Module) -> None:
    """A late row of a large tensor: a sample of values does not see it."""
    last = [parameter for parameter in trained(model) if parameter.dim() > 1][-1]
    last.data[-1].add_(0.01)


@torch.no_grad()
def a_buffer(model: nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.9)


@torch.no_grad()
def unused(model: nn.Module) -> None:
    """Parameters without a gradient so far."""
    for parameter in model.extra.parameters() if hasattr(model, "extra") else ():  # type: ignore[union-attr,operator]
        parameter.add_(0.01)


CHANGES: dict[str, Change] = {
    "clamped": clamped,
    "shrunk": shrunk,
    "one row": one_row,
    "a buffer": a_buffer,
    "unused": unused,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2)


def half() -> nn.Module:
    return images_model().bfloat16()


def seldom_used() -> nn.Module:
    model = tied_model()
    model.uses_extra = False
    return model


def changing(change: str, begin: int, model: nn.Module, optimizer: Any, step: int) -> None:
    """A step, and from step ``begin`` on a change after it."""
    if step == STEPS - 1 and hasattr(model, "uses_extra"):
        model.uses_extra = True
    plain(model, optimizer, step)
    if step >= begin:
        CHANGES[change](model)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: shrunk(model))
    return optimizer


def train_until_killed(
    make: Callable[[], nn.Module],
    optimizer_of: Callable[..., Any],
    loop: Callable[..., None],
    late: bool,
    folder: Path,
) -> None:
    """Train in this process, and end it by a kill; ``late`` when the last step is committed."""
    torch.set_num_threads(1)
    model = make()
    torch.manual_seed(5)
    moved = offloaded(model, optimizer_of(model), folder)
    train(model, moved, range(KILLED + 1), loop)
    if late:
        durable(moved, model)
    moved._engine.settle()  # else the step before the last may not be committed yet, where the disk is slow
    os.kill(os.getpid(), signal.SIGKILL)


def in_killed_child(*given: Any) -> None:
    """Call :func:`train_until_killed` in a process that was not forked from this one: backward may have threads."""
    child = fork_server().Process(target=train_until_killed, args=given)
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL


def durable(moved: OffloadedOptimizer, model: nn.Module) -> None:
    """Begin the next pass, as a loop does, and wait until the step before is committed."""
    model(images(model))
    moved._engine.settle()


def images(model: nn.Module) -> torch.Tensor:
    like = next(model.parameters())
    return torch.zeros(2, 5, dtype=torch.long) if hasattr(model, "extra") else torch.ones(2, 3, 8, 8).to(like)


@pytest.fixture(params=["before it is committed", "afterwards"])
def late(request: pytest.FixtureRequest) -> Iterator[bool]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the killed process
    yield request.param == "afterwards"
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("make", "change", "begin"),
    [
        *((make, change, 0) for make in (images_model, seldom_used) for change in CHANGES),
        (half, "clamped", 0),
        (half, "shrunk", KILLED),
        (images_model, "shrunk", KILLED),
        (seldom_used, "unused", KILLED),
    ],
)
def test_a_kill_loses_no_change(
    make: Callable[[], nn.Module], change: str, begin: int, late: bool, tmp_path: Path
) -> None:
    loop = partial(changing, change, begin)
    model, twin = make(), make()
    torch.manual_seed(5)
    with offloaded(model, adamw(model), tmp_path / "whole") as moved:
        train(model, moved, range(STEPS), loop)

    in_killed_child(make, adamw, loop, late, tmp_path / "job")
    with offloaded(twin, adamw(twin), tmp_path / "job") as moved:
        assert moved.steps == (KILLED + 1 if late else KILLED)
        train(twin, moved, range(moved.steps, STEPS), loop)
        assert weights_equal(model, twin)


@pytest.mark.parametrize("late", ["before it is committed", "afterwards"], indirect=True)
def test_hooks_of_a_step_belong_to_it(late: bool, tmp_path: Path) -> None:
    model, twin = images_model(), images_model()
    optimizer = hooked(model)
    train(model, optimizer, range(STEPS), plain)

    in_killed_child(images_model, hooked, plain, late, tmp_path)
    with offloaded(twin, hooked(twin), tmp_path) as moved:
        train(twin, moved, range(moved.steps, STEPS), plain)
        assert weights_equal(model, twin)


class Stopped(Exception):
    """Ends a loop in its validation."""


@pytest.mark.parametrize("way", ["error", "early end", "other weights in a validation"])
def test_only_weights_of_the_training_are_committed(way: str, tmp_path: Path) -> None:
    """A validation uses an average of the weights, and ends there."""
    model, twin, third = images_model(), images_model(), images_model()
    train(model, adamw(model), range(STEPS), plain)
    moved = offloaded(twin, adamw(twin), tmp_path)
    train(twin, moved, range(KILLED), plain)
    kept = {name: value.clone() for name, value in twin.state_dict().items()}
    if way == "early end":
        moved.close(remove=False)
    elif way == "error":
        with pytest.raises(Stopped), moved:
            shrunk(twin)
            twin.eval()
            twin(images(twin))
            raise Stopped
    else:
        shrunk(twin)
        with torch.no_grad():
            twin(images(twin))
        twin.eval()
        twin(images(twin))
        twin.load_state_dict(kept)
        twin.train()
        moved.close(remove=False)
    with offloaded(third, adamw(third), tmp_path) as found:
        assert found.steps == (KILLED - 1 if way == "error" else KILLED)
        train(third, found, range(found.steps, STEPS), plain)
        assert weights_equal(model, third)


@pytest.mark.parametrize(("elements", "is_met"), [(16_000, False), (100_000, True)])
def test_a_value_of_a_small_parameter_is_never_changed_unseen(elements: int, is_met: bool) -> None:
    """Of a large one samples are compared after the first steps, where this change is not."""
    parameter = nn.Parameter(torch.zeros(elements))
    watch = ValueWatch(parameter)
    for _ in range(9):
        watch.settle()
    assert watch.is_met()
    parameter.data[-1] = 1.0
    assert watch.is_met() == is_met
