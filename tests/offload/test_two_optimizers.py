"""Two optimizers, as a generator and a critic have: each commits its own steps, and goes on from them after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from support.offload_loops import offloaded, weights_equal
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

STEPS, KILLED = 8, 4


def pair() -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(12, 40), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(40, out))
        for out in (12, 1)
    ]
    return nn.ModuleDict({"generator": layers[0], "critic": layers[1]})


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def both(model: nn.ModuleDict, folder: Path) -> tuple[Any, Any]:
    """Offload both, the generator's last: torch's generators are those of the last one."""
    found = [offloaded(model[name], adamw(model[name]), folder / name) for name in ("critic", "generator")]
    return found[0], found[1]


def played(model: nn.ModuleDict, critics: Any, generators: Any, steps: range, folder: Path) -> None:
    """Train; a step is taken by the optimizer that has not taken it before a kill."""
    generator, critic = model["generator"], model["critic"]
    for step in steps:
        made = generator(torch.randn(8, 12))
        critics.zero_grad()
        (critic(made.detach()).mean() - critic(torch.randn(8, 12)).mean()).backward()
        if step >= getattr(critics, "steps", 0):
            critics.step()
        generators.zero_grad()
        (-critic(made).mean()).backward()
        if step == KILLED and folder.name == "whole":
            for name, optimizer in (("critic", critics), ("generator", generators)):
                optimizer._engine.settle()
                shutil.copytree(folder / name, folder.parent / "killed" / name)
        if step >= getattr(generators, "steps", 0):
            generators.step()


def test_a_pair_that_is_killed_between_its_commits_joins_again(tmp_path: Path) -> None:
    model, twin = pair(), pair()
    critics, generators = both(model, tmp_path / "whole")
    torch.manual_seed(5)
    with critics, generators:
        played(model, critics, generators, range(STEPS), tmp_path / "whole")
    plain = pair()
    torch.manual_seed(5)
    played(plain, adamw(plain["critic"]), adamw(plain["generator"]), range(STEPS), tmp_path)
    assert weights_equal(plain, model)
    critics, generators = both(twin, tmp_path / "killed")
    assert (critics.steps, generators.steps) == (KILLED + 1, KILLED)
    with critics, generators:
        played(twin, critics, generators, range(KILLED, STEPS), tmp_path / "killed")
    assert weights_equal(model, twin)


def test_the_layers_of_a_model_that_is_given_twice_have_one_plan(tmp_path: Path) -> None:
    """The outer one would never see what is saved, and measure for ever."""
    model = pair()
    first, second = (
        offloaded(model, adamw(model[name]), tmp_path / name, activations="swap")
        for name in ("critic", "generator")
    )
    with first, second:
        for step in range(3):
            model["critic"](model["generator"](inputs(step))).mean().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        assert not _get_current_dispatch_mode_stack()
        states = [optimizer.report()["activations"]["state"] for optimizer in (first, second)]
        assert states == ["planned", "kept"]
