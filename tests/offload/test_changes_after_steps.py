"""What a loop changes between a step and the next forward pass belongs to that step, also for a run after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import images_model, offloaded, plain, tied_model, train, weights_equal
from torch import nn

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


def loop_with(change: Change, begin: int = 0) -> Callable[[nn.Module, Any, int], None]:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == STEPS - 1 and hasattr(model, "uses_extra"):
            model.uses_extra = True
        plain(model, optimizer, step)
        if step >= begin:
            change(model)

    return loop


def in_killed_child(act: Callable[[], None]) -> None:
    """Run a function in a child that is killed when it returns."""
    child = os.fork()
    if not child:
        try:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


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
    torch.set_num_threads(1)  # a child has no threads of its parent
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
    loop = loop_with(CHANGES[change], begin)
    model, twin = make(), make()
    torch.manual_seed(5)
    with offloaded(model, adamw(model), tmp_path / "whole") as moved:
        train(model, moved, range(STEPS), loop)

    def killed() -> None:
        child = make()
        torch.manual_seed(5)
        moved = offloaded(child, adamw(child), tmp_path / "job")
        train(child, moved, range(KILLED + 1), loop)
        if late:
            durable(moved, child)

    in_killed_child(killed)
    with offloaded(twin, adamw(twin), tmp_path / "job") as moved:
        assert moved.steps == (KILLED + 1 if late else KILLED)
        train(twin, moved, range(moved.steps, STEPS), loop)
        assert weights_equal(model, twin)


@pytest.mark.parametrize("late", ["before it is committed", "afterwards"], indirect=True)
def test_hooks_of_a_step_belong_to_it(late: bool, tmp_path: Path) -> None:
    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.register_step_post_hook(lambda *_: shrunk(model))
        return optimizer

    model, twin = images_model(), images_model()
    optimizer = hooked(model)
    train(model, optimizer, range(STEPS), plain)

    def killed() -> None:
        child = images_model()
        moved = offloaded(child, hooked(child), tmp_path)
        train(child, moved, range(KILLED + 1), plain)
        if late:
            durable(moved, child)

    in_killed_child(killed)
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
