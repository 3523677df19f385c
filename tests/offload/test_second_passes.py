"""Layers that are computed a second time compute with what they were given and found the first time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.second_passes import (
    BLOCKS,
    ROWS,
    WIDTH,
    Block,
    Blocks,
    Forced,
    Loss,
    compare,
    gradients,
    inputs,
    usual,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hapi.offload.activations.offload import ActivationOffload


class Counts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.append(x.detach().mean())
        return x + self.body(x) / self.calls + len(self.kept)


class Draws(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * torch.rand(x.shape, generator=self.generator))


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) * self.gain


class ChangesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.9)
        return self.body(x.sin())


class Batch:
    """An object that passes through layers, as those of libraries for graphs do."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class InObject(Block):
    def forward(self, batch: Batch) -> Batch:  # type: ignore[override]
        batch.hidden = self.body(batch.hidden)
        return batch


class InDict(Block):
    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        batch["hidden"] = self.body(batch["hidden"])
        return batch


class Gathers(Block):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x = self.body(x) + sum(seen, torch.zeros(()))
        seen.append(x)
        return x


class Model(Blocks):
    """Blocks that take other things than a tensor, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        kind = type(self.blocks[0])
        if kind is InObject:
            batch = Batch(x)
            for block in self.blocks:
                batch = block(batch)
            return batch.hidden
        if kind is InDict:
            found = {"hidden": x}
            for block in self.blocks:
                found = block(found)
            return found["hidden"]
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen) if kind is Gathers else block(x)
        return x


def set_from_outside(model: Any, step: int) -> torch.Tensor:
    losses = []
    gains: list[Any] = [1.0, torch.tensor(0.3)]
    for gain in gains:
        for block in model.blocks:
            block.gain = gain
        losses.append(usual(model, step))
    return losses[0] + losses[1]


def in_eval_mode_by_then(model: nn.Module, step: int) -> torch.Tensor:
    model.train()
    found = usual(model, step)
    model.eval()
    return found


def frozen_by_then(model: Any, step: int) -> torch.Tensor:
    model.requires_grad_(True)
    found = usual(model, step)
    model.blocks[1].requires_grad_(False)
    return found


def other_weights(model: nn.Module, step: int) -> torch.Tensor:
    """A step of first-order MAML, which calls the model with weights of its own."""
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    inner = torch.func.functional_call(model, own, (inputs(step),)).square().mean()
    slopes = torch.autograd.grad(inner, list(own.values()))
    fast = {name: one - 0.1 * slope for (name, one), slope in zip(own.items(), slopes, strict=True)}
    found: torch.Tensor = torch.func.functional_call(model, fast, (inputs(step + 50),)).square().mean()
    return found


def with_dropout() -> nn.Module:
    model = Model(Block)
    for block in model.blocks:
        block.last = nn.Sequential(nn.Dropout(0.3), block.last)  # type: ignore[arg-type]
    return model


def normed() -> nn.Module:
    """Weights that a hook sets before each call, as torch's older spectral norm does."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)))


def passed_twice(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = usual(model, step) - model(inputs(step + 50)).tanh().mean()
    return found


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "counts": (lambda: Model(Counts), usual),
    "in a dict": (lambda: Model(InDict), usual),
    "gathers": (lambda: Model(Gathers), usual),
    "set from outside": (lambda: Model(Scaled), set_from_outside),
    "eval": (with_dropout, in_eval_mode_by_then),
    "frozen": (lambda: Model(Block), frozen_by_then),
    "other weights": (lambda: Model(Block), other_weights),
    "spectral norm": (normed, passed_twice),
}


@pytest.mark.slow_except("frozen")
@pytest.mark.parametrize("name", CASES)
def test_a_second_pass_finds_what_the_first_one_found(name: str, tmp_path: Path) -> None:
    assert compare(*CASES[name], tmp_path)["second passes"] >= BLOCKS


@pytest.mark.slow_except("generator")
@pytest.mark.parametrize(
    ("make", "loss", "why"),
    [
        (lambda: Model(Draws), usual, "it draws from a generator of its own"),
        (lambda: Model(ChangesItsInput), usual, "it changes its input in place"),
    ],
    ids=["generator", "input"],
)
def test_what_a_second_pass_would_do_otherwise_is_not_done_twice(
    make: Callable[[], nn.Module], loss: Loss, why: str, tmp_path: Path
) -> None:
    layers = compare(make, loss, tmp_path)
    assert layers["blocks.2"]["not_recomputed"].startswith(why)


@pytest.mark.slow
def test_a_layer_with_an_object_that_it_may_change_is_called_once(tmp_path: Path) -> None:
    compare(lambda: Model(InObject), usual, tmp_path)


def test_a_weight_changed_before_backward_is_told(tmp_path: Path) -> None:
    """In memory torch tells it of weights that backward needs; a second pass needs all."""
    model = Model(Block)
    offload = Forced(model, 900_000, [tmp_path], "recompute")
    with offload:
        gradients(model, usual)
        assert offload.second_passes() >= BLOCKS
        loss = usual(model, 9)
        with torch.no_grad():
            for parameter in model.blocks.parameters():
                parameter.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: Linear\.weight of shape"):
            loss.backward()


class Recurrent(nn.Module):
    """Its cells compute in place on parts of one tensor, each with a version of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.GRU(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(x.view(4, -1, WIDTH))[0])
        return found


@pytest.mark.slow_except("swap")
@pytest.mark.parametrize("policy", ["swap", "auto"])
def test_parts_with_versions_of_their_own_are_stored_one_by_one(policy: str, tmp_path: Path) -> None:
    expected, twin = gradients(Recurrent(), usual), Recurrent()
    with ActivationOffload(twin, 400_000, [tmp_path], policy) as offload:
        found = gradients(twin, usual)
        assert offload.report()["bytes_written"] > 0
    assert all(map(torch.equal, expected, found))


def by_samples(model: nn.Module, step: int) -> torch.Tensor:
    own = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, weights, (row,)).square().mean()
        return found

    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, inputs(step).unsqueeze(1))
    found: Any = sum((slopes[name].mean(0) * one).sum() for name, one in model.named_parameters())
    return found  # type: ignore[no-any-return]


def over_rows(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = torch.func.vmap(model)(inputs(step).unsqueeze(1)).square().mean()
    return found


def tangents(model: nn.Module, step: int) -> torch.Tensor:
    values = inputs(step)
    found: Any
    found, slope = torch.func.jvp(model, (values,), (torch.ones_like(values),))  # type: ignore[misc]
    return torch.stack([found.square().mean(), slope.square().mean()]).sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.sparse.mm(edges, self.first(x)).relu())
        return found


def over_edges(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(inputs(step), torch.eye(ROWS).to_sparse()).square().mean()
    return found


@pytest.mark.slow_except("vmap", "sparse")
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: Model(Block), by_samples),
        (lambda: Model(Block), over_rows),
        (lambda: Model(Block), tangents),
        (Sparse, over_edges),
    ],
    ids=["gradients of samples", "vmap", "jvp", "sparse"],
)
def test_transforms_and_sparse_inputs_pass(make: Callable[[], nn.Module], loss: Loss, tmp_path: Path) -> None:
    compare(make, loss, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_loop_that_calls_layers_and_not_their_model_is_planned_too(
    is_checkpointed: bool, tmp_path: Path
) -> None:
    """As a Lightning module's training step does: without a plan each later pass would be measured."""

    def by_layers(model: Any, step: int) -> torch.Tensor:
        first = model.first
        x = checkpoint(first, inputs(step), use_reentrant=False) if is_checkpointed else first(inputs(step))
        for block in model.blocks:
            x = block(x)
        found: torch.Tensor = x.square().mean()
        return found

    expected, twin = gradients(Model(Block), by_layers), Model(Block)
    with ActivationOffload(twin, 1 << 30, [tmp_path]) as offload:
        found = gradients(twin, by_layers)
        report = offload.report()
    assert report["state"] == "planned" and report["case"] == "everything fits"
    assert report["predicted_peak_bytes"] < 100 << 20, "the process's own memory is no pass's"
    assert all(map(torch.equal, expected, found))
