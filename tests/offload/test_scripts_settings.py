"""Settings of a script that must not change what offloaded steps compute: default types and devices, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import offloaded, states_equal, train, weights_equal
from torch import nn

from hapi.errors import UsageError

FEW_STEPS, MANY_STEPS = 12, 260
"""The second is more than bfloat16 counts."""
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models in half precision are made so, and scripts forget to turn it back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3)).float()


def small(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator("cpu").manual_seed(step)
    inputs = torch.randn(4, 7, dtype=torch.float32, device="cpu", generator=generator)
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.slow_cases("torch.bfloat16-adamw", "torch.bfloat16-amsgrad")
@pytest.mark.parametrize("kind", KINDS)
def test_default_types_change_no_bit(kind: str, default_type: None, tmp_path: Path) -> None:
    model, twin = small_model(), small_model()
    counts = kind != "momentum" and torch.get_default_dtype() == torch.bfloat16
    steps = range(MANY_STEPS if counts else FEW_STEPS)
    optimizer = KINDS[kind](model.parameters())
    with offloaded(twin, KINDS[kind](twin.parameters()), tmp_path) as moved:
        train(model, optimizer, steps, small)
        train(twin, moved, steps, small)
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())


def test_a_default_device_is_not_that_of_the_states(tmp_path: Path) -> None:
    model, twin = small_model(), small_model()
    optimizer = KINDS["adamw"](model.parameters())
    inner = KINDS["adamw"](twin.parameters())
    train(model, optimizer, range(6), small)
    with torch.device("meta"), offloaded(twin, inner, tmp_path, activations="auto") as moved:
        train(twin, moved, range(6), small)
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        ("momentum", "momentum", 0.0, "momentum"),
        ("amsgrad", "amsgrad", False, "amsgrad"),
        ("adamw", "amsgrad", True, "amsgrad"),
        ("plain", "momentum", 0.9, "momentum"),
    ],
)
def test_options_that_ask_for_other_states_are_refused(
    kind: str, option: str, value: object, named: str, tmp_path: Path
) -> None:
    """There is no room for these states; without a word each step would be the first one."""
    kinds = {**KINDS, "plain": lambda parameters: torch.optim.SGD(parameters, lr=1e-3)}
    model = small_model()
    with offloaded(model, kinds[kind](model.parameters()), tmp_path) as moved:
        train(model, moved, range(4), small)
        moved.param_groups[0][option] = value
        with pytest.raises(UsageError, match=f"{named} was switched o[nf]+ .* before hapi.offload_training"):
            train(model, moved, range(4, 6), small)
        assert moved.steps == 4


def test_momentum_may_take_other_values(tmp_path: Path) -> None:
    def cycled(model: nn.Module, optimizer: Any, step: int) -> None:
        small(model, optimizer, step)
        optimizer.param_groups[0]["momentum"] = 0.85 + 0.01 * (step % 5)

    model, twin = small_model(), small_model()
    optimizer = KINDS["momentum"](model.parameters())
    with offloaded(twin, KINDS["momentum"](twin.parameters()), tmp_path) as moved:
        train(model, optimizer, range(8), cycled)
        train(twin, moved, range(8), cycled)
        assert weights_equal(model, twin)
