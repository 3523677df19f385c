"""A loop that does late, between backward and step, what it did not in its first steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import (
    Loop,
    backward,
    batch,
    groups_of,
    images_model,
    offloaded,
    plain,
    states_equal,
    tied_model,
    train,
    weights_equal,
)
from torch import nn

from hapi.offload.failures import GradientGoneError
from hapi.offload.loop.gradients import OffloadedGradient

LATE, STEPS = 6, 9
Act = Callable[[nn.Module, Any], object]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def lower_rate(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def halve(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def replace_one(model: nn.Module, optimizer: Any) -> None:
    first = next(model.parameters())
    first.grad = torch.full_like(first, 0.01)


def evaluate(model: nn.Module, optimizer: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(batch(model, 5)[0])
    model.train()
    return found


def once_more(model: nn.Module, optimizer: Any) -> None:
    backward(model, 99)


def read(model: nn.Module, optimizer: Any) -> None:
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]


def save(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def save_all(model: nn.Module, optimizer: Any) -> dict[Any, Any]:
    states = optimizer.state_dict()["state"].values()
    return {(n, name): value.clone() for n, state in enumerate(states) for name, value in state.items()}


HARMLESS: list[Act] = [evaluate, save, save_all]
"""They use the values and states before the step, and leave the step as it is."""
SURPRISES: list[Act] = [lower_rate, halve, replace_one, once_more, read]


def surprising(*acts: Act, first: int = LATE) -> Loop:
    """A loop that acts between backward and step."""

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        backward(model, step)
        for act in acts if step >= first else ():
            act(model, optimizer)
        optimizer.step()

    return loop


def half_model() -> nn.Module:
    return images_model().bfloat16()


ONE_OF_EACH = ((evaluate, images_model, LATE), (save, tied_model, LATE), (save_all, half_model, 0))
"""All acts, models and times."""


@pytest.mark.slow_except("save-tied_model-6")
@pytest.mark.parametrize(
    ("act", "make", "first"),
    [
        pytest.param(*one, marks=() if one in ONE_OF_EACH else pytest.mark.slow)
        for one in itertools.product(HARMLESS, (images_model, tied_model, half_model), (LATE, 0))
    ],
)
def test_a_look_at_values_needs_no_gradient(
    act: Act, make: Callable[[], nn.Module], first: int, tmp_path: Path
) -> None:
    """The step that was computed ahead is put aside, and taken from its slots afterwards."""
    model, twin = make(), make()
    seen: list[Any] = []
    loop = surprising(lambda model, optimizer: seen.append(act(model, optimizer)), first=first)
    with offloaded(model, adamw(model), tmp_path / "one", keep_gradients=True, mode="serial") as plain_steps:
        torch.manual_seed(3)
        train(model, plain_steps, range(STEPS), loop)
        expected, seen = seen, []
        with offloaded(twin, adamw(twin), [tmp_path / "a", tmp_path / "b"]) as moved:
            torch.manual_seed(3)
            train(twin, moved, range(STEPS), loop)
            report = moved.report()
            assert weights_equal(model, twin)
            assert states_equal(plain_steps.state_dict(), moved.state_dict())
    assert len(seen) == len(expected) == STEPS - first
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    assert report["restored_steps"] and not report["redone_steps"]


def test_a_parameter_that_is_changed_after_a_look_at_values_keeps_its_change(tmp_path: Path) -> None:
    """The values that were computed ahead are those of a step from the parameter as it was."""

    def looked_at_and_changed(model: nn.Module, optimizer: Any) -> None:
        evaluate(model, optimizer)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    loop, (model, twin) = surprising(looked_at_and_changed), (images_model(), images_model())
    train(model, adamw(model), range(STEPS), loop)
    with offloaded(twin, adamw(twin), tmp_path, keep_gradients=True) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)


@pytest.mark.parametrize("act", SURPRISES)
def test_acts_of_the_first_steps_are_learned(act: Act, tmp_path: Path) -> None:
    model, twin = images_model(), images_model()
    train(model, adamw(model), range(STEPS), surprising(act, first=0))
    with offloaded(twin, torch.optim.AdamW(groups_of(twin), lr=1e-2), tmp_path) as moved:
        train(twin, moved, range(STEPS), surprising(act, first=0))
        assert weights_equal(model, twin)


@pytest.mark.parametrize(
    "acts", [(act,) for act in SURPRISES] + [(evaluate, lower_rate), (evaluate, once_more)]
)
def test_a_late_one_ends_with_a_line_and_the_next_run_goes_on(acts: tuple[Act, ...], tmp_path: Path) -> None:
    model, twin = images_model(), images_model()
    train(model, adamw(model), range(STEPS), surprising(*acts))
    moved = offloaded(twin, adamw(twin), tmp_path)
    with pytest.raises(GradientGoneError, match=r"needed again.* a next run on this folder goes on from it"):
        train(twin, moved, range(STEPS), surprising(*acts))
    moved.close(remove=False)
    again = images_model()
    with offloaded(again, adamw(again), tmp_path) as found:
        assert found.steps in (LATE - 1, LATE)
        train(again, found, range(found.steps, STEPS), surprising(*acts))
        assert weights_equal(model, again)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("act", SURPRISES)
def test_with_gradients_kept_from_the_beginning_it_is_equal(act: Act, tmp_path: Path) -> None:
    model, twin = images_model(), images_model()
    train(model, adamw(model), range(STEPS), surprising(evaluate, act))
    with offloaded(twin, adamw(twin), tmp_path, keep_gradients=True) as moved:
        train(twin, moved, range(STEPS), surprising(evaluate, act))
        assert weights_equal(model, twin)


def test_a_gradient_that_was_not_kept_is_named(tmp_path: Path) -> None:
    model = images_model()
    moved = offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path)
    train(model, moved, range(6), plain)
    moved.zero_grad()
    backward(model, 6)
    first = next(model.parameters())
    assert isinstance(first.grad, OffloadedGradient)
    assert first.grad.shape == first.shape
    with pytest.raises(GradientGoneError, match="keep_gradients=True"):
        print(first.grad.sum())
    moved.close()
