"""Models that torch compiles after they were given: the bits of memory, or one clear line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import offloaded, weights_equal
from support.second_passes import Block, Blocks, Forced, inputs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hapi.errors import UsageError
from hapi.offload import training

STEPS, LATE = 7, 5
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def one_layer(model: Any) -> Any:
    model.blocks[1].compile(backend="aot_eager")
    return model


def a_function(model: Any) -> Any:
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="aot_eager")
    return model


def train(model: Any, optimizer: Any) -> list[float]:
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        if step >= LATE:  # between backward and step, which nothing has done before
            with torch.no_grad():
                found.append(model(inputs(99)).sum().item())
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.long_cases("in_place")
@pytest.mark.slow
@pytest.mark.parametrize("way", [whole, in_place, one_layer, a_function])
def test_a_model_that_is_compiled_afterwards_has_the_bits_of_memory(
    way: Callable[[Any], Any], tmp_path: Path
) -> None:
    model, twin = Blocks(Block), Blocks(Block)
    optimizer = adamw(model)
    expected = train(way(model), optimizer)
    torch._dynamo.reset()
    with offloaded(twin, adamw(twin), tmp_path, activations="recompute", keep_gradients=True) as moved:
        found = train(way(twin), moved)
        report = moved.report()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert found == expected
    assert report["activations"]["policy"] == "keep"


def twice(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend whose code has other bits than the function it was given."""
    return lambda *args: tuple(2 * value for value in graph(*args))


class Calling(Block):
    """A layer that calls a function compiled elsewhere."""

    function: Any = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.function(self.last(torch.tanh(self.first(x)).exp()))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("backend", [twice, "aot_eager"])
def test_functions_compiled_elsewhere_run_compiled_while_a_pass_is_measured(
    policy: str, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ActivationOffload", Forced)
    monkeypatch.setattr(Calling, "function", staticmethod(torch.compile(torch.sin, backend=backend)))
    model, twin = Blocks(Calling), Blocks(Calling)
    expected = train(model, adamw(model))
    with offloaded(twin, adamw(twin), tmp_path, activations=policy, keep_gradients=True) as moved:
        assert train(twin, moved) == expected
        layers = moved.report()["activations"]["layers"]
        assert any(layer["flops"] > 0 for layer in layers)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


class Branching(Block):
    """A layer with an operator of higher order."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.first(x),))
        return found


@pytest.mark.slow
def test_operators_of_higher_order_are_measured(tmp_path: Path) -> None:
    model, twin = Blocks(Branching), Blocks(Branching)
    expected = train(model, adamw(model))
    with offloaded(twin, adamw(twin), tmp_path, activations="swap", keep_gradients=True) as moved:
        assert train(twin, moved) == expected


@pytest.mark.slow
def test_a_step_in_a_compiled_function_is_refused(tmp_path: Path) -> None:
    """Torch compiles its own optimisers there, whose steps have other bits then."""
    model = nn.Linear(9, 60)
    with offloaded(model, adamw(model), tmp_path) as moved:

        def step(values: torch.Tensor) -> None:
            model(values).square().mean().backward()
            moved.step()

        with pytest.raises(
            UsageError, match=r"optimizer.step\(\) is called in a function that torch.compile"
        ):
            torch.compile(step, backend="eager")(torch.ones(2, 9))


@pytest.mark.slow
def test_a_loops_own_counter_counts_its_own_operations(tmp_path: Path) -> None:
    """The first pass is measured, with operators that are not the loop's."""
    model, twin = Blocks(Block), Blocks(Block)
    with FlopCounterMode(display=False) as counter:
        train(model, adamw(model))
    with (
        offloaded(twin, adamw(twin), tmp_path, activations="swap", keep_gradients=True) as moved,
        FlopCounterMode(display=False) as other,
    ):
        train(twin, moved)
        assert weights_equal(model, twin)
    assert other.get_total_flops() == counter.get_total_flops()
