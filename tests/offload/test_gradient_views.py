"""Gradients of offloaded training under the hands of a loop: views, ``.data``, old ones, one in another's place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import ForkedProcess
from support.forked_python import PYTHON
from support.offload_loops import (
    backward,
    groups_of,
    images_model,
    offloaded,
    tied_model,
    train,
    weights_equal,
)
from torch import nn

from hapi.offload.failures import GradientGoneError
from hapi.offload.loop.gradients import OffloadedGradient

TESTS = Path(__file__).parents[1]
Act = Callable[[nn.Parameter], object]


def assigned(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.grad.data = values  # type: ignore[union-attr]


def halved(parameter: nn.Parameter) -> None:
    parameter.grad.data /= 2.0  # type: ignore[union-attr]


def set_again(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.detach()  # type: ignore[union-attr]


def set_to_a_view(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3.0)  # type: ignore[union-attr]
    parameter.grad = parameter.grad[:]  # type: ignore[index]


def rows(parameter: nn.Parameter) -> None:
    for number, row in enumerate(parameter.grad):  # type: ignore[arg-type]
        row.mul_(0.1 * number)


ACTS: dict[str, Any] = {
    "an element": lambda p: p.grad.__setitem__(0, 0.0),
    "a slice": lambda p: p.grad[1:4].mul_(0.25),
    "a slice of a slice": lambda p: p.grad[1:6][1:3].zero_(),
    "elements by a mask": lambda p: p.grad.__setitem__(p.grad > 0, 0.0),
    "rows": rows,
    "halves": lambda p: p.grad.chunk(2)[0].clamp_(-1e-3, 1e-3),
    "transposed": lambda p: p.grad.transpose(0, -1)[0].fill_(1e-3),
    "copied from a part": lambda p: p.grad[:2].copy_(p.grad[2:4].clone()),
    "data": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "a part of data": lambda p: p.grad.data[2:].neg_(),
    "data, halved": halved,
    "data, assigned": lambda p: assigned(p, p.grad * 0.5),
    "detached": lambda p: p.grad.detach().mul_(2.0),
    "set again": set_again,
    "set to a view": set_to_a_view,
    "from below": lambda p: p.grad.clamp_(min=-1e-3),
    "from above": lambda p: p.grad.clamp_(max=1e-3),
    "as an array": lambda p: p.grad.mul_(float(p.grad.numpy().sum())),
    "only looked at": lambda p: p.grad[0].sum().item() + p.grad.data.norm().item(),
}


@pytest.mark.slow_except("set again-late", "data, halved-late", "detached-late")
@pytest.mark.parametrize(
    "late", [pytest.param(False, id="always", marks=pytest.mark.slow), pytest.param(True, id="late")]
)
@pytest.mark.parametrize("name", ACTS)
def test_a_change_of_a_view_is_one_of_the_gradient(name: str, late: bool, tmp_path: Path) -> None:
    act: Act = ACTS[name]

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for part in range(1 + step % 2):
            backward(model, 10 * step + part)
        if step > 3 or not late:
            for parameter in model.parameters():
                if parameter.grad is not None and len(parameter) > 6:
                    act(parameter)
        optimizer.step()

    for make in (tied_model, images_model):
        model, twin = make(), make()
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
        folder = tmp_path / make.__name__
        with offloaded(
            twin, torch.optim.AdamW(groups_of(twin), lr=1e-2), folder, keep_gradients=True
        ) as moved:
            for one, its in ((model, optimizer), (twin, moved)):
                torch.manual_seed(5)
                train(one, its, range(7), loop)
            assert weights_equal(model, twin)


def test_an_array_of_a_gradient_cannot_be_written(tmp_path: Path) -> None:
    """The change would be lost."""
    model = images_model()
    with offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path):
        backward(model, 0)
        values = model[6].bias.grad.numpy()  # type: ignore[index,union-attr,operator]
        with pytest.raises(ValueError, match="read-only"):
            values[:] *= 0.5


def test_one_gradient_in_the_place_of_another(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 9) * (step + 1)).square().sum().backward()
        if step % 2:
            model[1].weight.grad = model[0].weight.grad  # type: ignore[index]
        optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))

    model, twin = make(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inner = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with offloaded(twin, inner, tmp_path, keep_gradients=True) as moved:
        train(model, optimizer, range(8), loop)
        train(twin, moved, range(8), loop)
        assert weights_equal(model, twin)


def test_a_gradient_that_is_held_too_long_is_named(tmp_path: Path) -> None:
    """In memory it would keep its values; here another one has taken its place, whose values it must not tell."""
    model = images_model()
    with offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path) as moved:
        backward(model, 0)
        parameter = model[6].weight  # type: ignore[index]
        held = parameter.grad
        assert isinstance(held, OffloadedGradient)
        part, copied = held[0], held.clone()
        moved.zero_grad()
        backward(model, 1)
        for old in (held, part):
            with pytest.raises(
                GradientGoneError, match=r"of 6\.weight was dropped .* parameter\.grad\.clone\(\)"
            ):
                old.sum()
        assert "OffloadedGradient" in repr(held)
        assert not torch.equal(copied, parameter.grad.clone())
        moved.step()


RANK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from support.offload_loops import *
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
model, twin = tied_model(), tied_model()
optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
moved = offloaded(twin, torch.optim.AdamW(groups_of(twin), lr=1e-2), folder / str(rank), keep_gradients=True)
for one, its in ((model, optimizer), (twin, moved)):
    torch.manual_seed(5)
    for step in range(6):
        its.zero_grad()
        backward(one, 10 * step + rank)
        for parameter in one.parameters():
            if parameter.grad is not None and step != 3:
                dist.all_reduce(parameter.grad)
                parameter.grad.data /= 2
        its.step()
print(weights_equal(model, twin))
moved.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_that_a_loop_averages_itself(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-c", RANK]
    ranks = [
        ForkedProcess([*command, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    assert [rank.communicate(timeout=240)[0].strip() for rank in ranks] == ["True", "True"]
