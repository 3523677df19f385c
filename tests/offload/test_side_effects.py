"""Layers whose forward pass changes more than its output are not computed a second time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.second_passes import BLOCKS, WIDTH, Block, Blocks, Forced, compare, gradients, usual
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

HELD = "its forward pass changes a parameter or another tensor that it holds"
OBJECT = "it changes an object that it holds, or a generator"


class Codes(Block):
    """A codebook that follows its inputs by ``.data``, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(x, self.codes.weight).argmin(1)
        self.codes.weight.data.lerp_(x.detach()[:4], 0.1)
        return self.body(x + self.codes(near))


class Normalises(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data = nn.functional.normalize(self.first.weight.data, dim=1)
        return self.body(x)


class Shortens(Block):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.words((x[:, 0].abs() * 9).long().clamp(max=29)))


class Remembers(Block):
    """Has a tensor that is no buffer, and changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.mul_(0.9).add_(x.detach().mean(0))
        return self.body(x + self.memory)


class ByRandom(Block):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * (0.5 + self.chance.random()))


class ByNumpy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.chance = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * float(self.chance.random()))


CHANCE = np.random.default_rng(5)
COUNTS = [0]


class ByNumpyOutside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * float(CHANCE.random()))


class CountsOutside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS[0] += 1
        return self.body(x * (1 + 0.01 * COUNTS[0]))


class Meter:
    def __init__(self) -> None:
        self.number = 0

    def update(self) -> None:
        self.number += 1


class Measures(Block):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.update()
        return self.body(x) / self.meter.number


class CountsWithin(Block):
    def __init__(self) -> None:
        super().__init__()
        self.facts = {"calls": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.facts["calls"][0] += 1
        return self.body(x) / self.facts["calls"][0]


def made(block: type[Block]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        global CHANCE
        CHANCE, COUNTS[0] = np.random.default_rng(5), 0
        return Blocks(block)

    return make


@pytest.mark.slow_except(
    "CountsWithin-it changes an object that it holds, or a generator",
    "Measures-it changes an object that it holds, or a generator",
    "CountsOutside-it changes an object that it holds, or a generator",
)
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Codes, HELD),
        (Normalises, HELD),
        (Shortens, HELD),
        (Remembers, HELD),
        (ByRandom, OBJECT),
        (ByNumpy, OBJECT),
        (ByNumpyOutside, OBJECT),
        (CountsOutside, OBJECT),
        (Measures, OBJECT),
        (CountsWithin, OBJECT),
    ],
)
def test_what_would_be_changed_twice_is_changed_once(block: type[Block], why: str, tmp_path: Path) -> None:
    layers = compare(made(block), usual, tmp_path)
    assert layers["blocks.2"]["not_recomputed"].startswith(why)


@pytest.mark.slow
def test_features_that_hooks_gather_are_gathered_once(tmp_path: Path) -> None:
    """A list that is cleared before backward would hold those of second passes in the next step."""

    def loss(model: Any, step: int) -> torch.Tensor:
        found = usual(model, step)
        for one in model.gathered:
            found = found + one.square().mean()
        seen.append(len(model.gathered))
        model.gathered.clear()
        return found

    def make() -> nn.Module:
        model: Any = Blocks(Block)
        model.gathered = []
        for block in model.blocks:
            block.first.register_forward_hook(lambda module, given, out: model.gathered.append(out))
        return model  # type: ignore[no-any-return]

    seen: list[int] = []
    layers = compare(make, loss, tmp_path)
    assert set(seen) == {BLOCKS}
    assert layers["blocks.2"]["not_recomputed"].startswith("Linear in it has a forward hook")


def test_hooks_of_all_modules_and_steps_are_called_as_often_as_in_memory(tmp_path: Path) -> None:
    """Also where torch's libraries are used for the first time, before the memory is measured."""

    def make() -> nn.Module:
        counts.append(0)
        return Blocks(Block)

    counts: list[int] = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda *_: counts.append(counts.pop() + 1)),
        register_optimizer_step_post_hook(lambda *_: counts.append(counts.pop() + 1)),
    ]
    try:
        compare(make, usual, tmp_path)
    finally:
        for handle in handles:
            handle.remove()
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_cached_parametrizations_are_not_computed_anew(tmp_path: Path) -> None:
    """By the time of backward nothing is cached any more."""

    def make() -> nn.Module:
        model: Any = Blocks(Block)
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.first)
        return model  # type: ignore[no-any-return]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with nn.utils.parametrize.cached():
            return usual(model, step) + usual(model, step + 50)

    compare(make, loss, tmp_path)


class LateCodes(Codes):
    """It begins late, when the plan is made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= 4:
            return self.body(x + self.codes.weight[0])
        return super().forward(x)


@pytest.mark.slow
def test_a_late_change_is_told(tmp_path: Path) -> None:
    model = Blocks(LateCodes)
    offload = Forced(model, 900_000, [tmp_path], "recompute")
    with offload:
        gradients(model, usual)
        assert offload.second_passes() >= BLOCKS
        with pytest.raises(RuntimeError, match=r'weight of shape .* or give activations="swap"'):
            gradients(model, usual)
