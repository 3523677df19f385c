"""Small trainings, run with their states in memory and elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.cache.disk_rates import DiskRates
from hapi.offload import training
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.pieces import plan_pieces

State = dict[str, torch.Tensor]
PIECE_ELEMENTS = 1 << 12


class TiedModel(nn.Module):
    """Embeddings that are the last layer too, frozen layers between, BatchNorm, dropout, and a layer seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 33)
        self.first = nn.Linear(33, 70)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)
        self.norm = nn.BatchNorm1d(70)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(70, 33)
        self.extra = nn.Linear(33, 33)
        self.uses_extra = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).mean(1)
        hidden = self.dropout(self.norm(self.frozen(torch.relu(self.first(hidden)))))
        hidden = self.last(hidden)
        if self.uses_extra:
            hidden = hidden + self.extra(hidden)
        return hidden @ self.embedding.weight.T


def images_model() -> nn.Module:
    """Convolutions in channels-last order before linear layers."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 36, 40),
        nn.ReLU(),
        nn.Linear(40, 7),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def tied_model() -> TiedModel:
    torch.manual_seed(4)
    return TiedModel()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own; frozen parameters are left out, as is usual."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 3e-2},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def offloaded(
    model: nn.Module, optimizer: torch.optim.Optimizer, disk: Path | Sequence[Path] | None, **more: Any
) -> OffloadedOptimizer:
    """Offload with pieces so small that every parameter takes several, to a disk whose rates nobody measures."""
    planned, measured = training.plan_pieces, training.measure_disk
    training.measure_disk = lambda folder: DiskRates(1e9, 1e9)
    training.plan_pieces = lambda sizes, drives, **more: plan_pieces(sizes, drives, PIECE_ELEMENTS, **more)  # type: ignore[assignment]
    try:
        options = {"memory": "1KB", "disk": disk, "activations": "keep", **more}
        _, made = training.offload_training(model, optimizer, **options)
    finally:
        training.plan_pieces, training.measure_disk = planned, measured
    assert isinstance(made, OffloadedOptimizer)
    return made


def batch(model: nn.Module, seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of a seed, where the model is."""
    generator = torch.Generator().manual_seed(seed)
    like = next(model.parameters())
    if isinstance(model, TiedModel):
        inputs = torch.randint(0, 97, (rows, 5), generator=generator)
        labels = torch.randint(0, 97, (rows,), generator=generator)
    else:
        inputs = torch.randn(rows, 3, 8, 8, generator=generator, dtype=like.dtype)
        labels = torch.randint(0, 7, (rows,), generator=generator)
    return inputs.to(like.device), labels.to(like.device)


def backward(model: nn.Module, seed: int) -> float:
    inputs, labels = batch(model, seed)
    loss = nn.functional.cross_entropy(model(inputs).float(), labels)
    loss.backward()
    return loss.item()


Loop = Callable[[nn.Module, Any, int], None]
"""One step of a loop, by its number."""


def train(model: nn.Module, optimizer: Any, steps: range, loop: Loop) -> None:
    for step in steps:
        loop(model, optimizer, step)


def plain(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    """Clips hard in some steps, and not in others."""
    optimizer.zero_grad()
    backward(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3 if step % 3 else 1e6)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
    """Windows of four passes, with a shorter one at times; the first has one."""
    optimizer.zero_grad()
    for part in range(1 if not step else 2 if step % 5 == 4 else 4):
        backward(model, 10 * step + part)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def disorderly(model: nn.Module, optimizer: Any, step: int) -> None:
    """Everything a loop may do between backward and step, drawn by the step's number."""
    chance = random.Random(step)
    if isinstance(model, TiedModel):
        model.uses_extra = chance.random() < 0.7
    way = chance.choice(["our zeros", "model's", "keep", "to zero", "nothing"])
    if way == "our zeros":
        optimizer.zero_grad()
    elif way == "model's":
        model.zero_grad()
    elif way == "to zero":
        optimizer.zero_grad(set_to_none=False)
    for part in range(chance.choice([1] * 7 + [2])):
        backward(model, 10 * step + part)
    between(model, optimizer, chance)
    if chance.random() < 0.1:
        return
    optimizer.step()
    if chance.random() < 0.1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def between(model: nn.Module, optimizer: Any, chance: random.Random) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for _ in range(chance.choice([0, 0, 0, 0, 0, 1, 2])):
        act = chance.randrange(7)
        if act == 0:
            nn.utils.clip_grad_norm_(trained, chance.choice([0.1, 1e6]))
        elif act == 1:
            nn.utils.clip_grad_value_(trained, 0.01)
        elif act == 2:
            optimizer.param_groups[0]["lr"] *= 0.9
        elif act == 3:
            model.eval()
            with torch.no_grad():
                model(batch(model, 5)[0])
            model.train()
        elif act == 4:
            chance.choice(trained).grad.add_(0.001)  # type: ignore[union-attr]
        elif act == 5:
            one = chance.choice(trained)
            one.grad = torch.full_like(one, 0.01) if chance.random() < 0.5 else None
            trained = [parameter for parameter in trained if parameter.grad is not None]
        else:
            for parameter in trained:
                parameter.grad.div_(2.0)  # type: ignore[union-attr]


def states_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Compare two optimisers' state dicts bit by bit, options included."""
    if one["param_groups"] != other["param_groups"]:
        return False
    for number, state in one["state"].items():
        kept = {name: value for name, value in state.items() if value is not None}
        if not all(torch.equal(value, other["state"][number][name]) for name, value in kept.items()):
            return False
    return True


def weights_equal(one: nn.Module, other: nn.Module) -> bool:
    """Compare two models' tensors bit by bit."""
    found = other.state_dict()
    return all(torch.equal(value, found[name]) for name, value in one.state_dict().items())
