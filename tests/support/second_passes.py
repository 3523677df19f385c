"""A model of blocks whose layers are computed a second time, and its gradients beside those of plain training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.offload.activations.counters import LayerRoom
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.layer_memory import Action
from hapi.offload.planner import Plan, Problem

WIDTH, ROWS, BLOCKS = 128, 256, 4
Loss = Callable[[nn.Module, int], torch.Tensor]


def inputs(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.gain = 0, 1.0
        self.kept: list[torch.Tensor] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)).exp()).sin()
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Blocks(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def usual(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(inputs(step)).square().mean()
    return found


def gradients(model: nn.Module, loss: Loss) -> list[torch.Tensor]:
    torch.manual_seed(5)
    found = []
    for step in range(4):
        model.zero_grad()
        loss(model, step).backward()
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


class Forced(ActivationOffload):
    """Computes a second time, or swaps, all that it can, whatever that frees."""

    def _apply(self, problem: Problem, plan: Plan) -> None:
        super()._apply(problem, plan)
        self._steps_aside = False
        for number, why in enumerate(self._reasons):
            if self._policy == "swap":
                self._rooms[number] = LayerRoom()
            elif why is None or why.startswith("it would free nothing"):
                self._actions[number] = Action.RECOMPUTE

    def second_passes(self) -> int:
        return self._actions.count(Action.RECOMPUTE)


def compare(make: Callable[[], nn.Module], loss: Loss, folder: Path) -> dict[str, Any]:
    """Compare gradients bit by bit; return the report's layers by their names, and the number of second passes."""
    expected, twin = gradients(make(), loss), make()
    offload = Forced(twin, 900_000, [folder], "recompute")
    with offload:
        found = gradients(twin, loss)
        layers = {layer["name"]: layer for layer in offload.report()["layers"]}
        layers["second passes"] = offload.second_passes()
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    return layers
