"""Loops of many kinds, as people write them, take the steps that they take in memory, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import images_model, offloaded, plain, train, weights_equal
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

Make = Callable[[], nn.Module]
Loop = Callable[[nn.Module, Any, int], object]
STEPS = 9


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))


def normed() -> nn.Module:
    named = nn.utils.parametrizations
    return nn.Sequential(
        named.weight_norm(nn.Linear(9, 30)), nn.Tanh(), named.spectral_norm(nn.Linear(30, 3))
    )


class Scaled(nn.Module):
    """A parameter of no dimension, as CLIP has, and one of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(1.3)), nn.Linear(9, 300)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values) * self.scale.exp() + self.empty.sum()


class Attending(nn.Module):
    """Attention of which the output alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(18, 2, batch_first=True)
        for parameter in (self.inner.in_proj_weight, self.inner.in_proj_bias):
            parameter.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.repeat(1, 2).unsqueeze(0)
        found: torch.Tensor = self.inner(rows, rows, rows)[0]
        return found


class Recurrent(nn.LSTM):
    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values.unsqueeze(0))[0]


class Words(nn.Module):
    """Embeddings whose rows are shortened in place when they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(30, 16, max_norm=0.5, padding_idx=0), nn.Linear(16, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding((values.abs() * 9).long().clamp(max=29)).mean(1))  # type: ignore[no-any-return]


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int, **more: Any) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(step)).tanh().square().mean()
    loss.backward(**more)  # type: ignore[no-untyped-call]
    return loss


def usual(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def looked_at(model: nn.Module, optimizer: Any, step: int) -> None:
    """A forward pass between backward and step, and a further backward pass that nobody expects."""
    optimizer.zero_grad()
    backward(model, step)
    if step in (5, 6):
        model(inputs(0))
    if step == 7:
        backward(model, 100)
    optimizer.step()


def two_passes(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        backward(model, 2 * step + part)
    optimizer.step()


def by_closure(model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model, step)

    optimizer.step(closure)


def recomputed(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    values = inputs(step).requires_grad_()
    for layer in model:  # type: ignore[attr-defined]
        values = checkpoint(layer, values, use_reentrant=True)
    values.square().mean().backward()
    optimizer.step()


def penalised(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    values = inputs(step).requires_grad_()
    found = model(values).tanh().sum()
    (slope,) = torch.autograd.grad(found, values, create_graph=True)
    (found + (slope.norm(dim=1) - 1).square().mean()).backward()
    optimizer.step()


def curved(model: nn.Module, optimizer: Any, step: int) -> None:
    """Differentiates the gradients that backward left, as estimates of a Hessian's diagonal do."""
    optimizer.zero_grad()
    backward(model, step, create_graph=True)
    parameters = list(model.parameters())
    gradients = [one.grad for one in parameters]
    curves = torch.autograd.grad(gradients, parameters, [torch.ones_like(one) for one in parameters])  # type: ignore[type-var]
    for one, curve in zip(parameters, curves, strict=True):
        one.grad = one.grad.detach() + 0.01 * curve  # type: ignore[union-attr]
    optimizer.step()


def with_graph(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step, create_graph=True)
    optimizer.step()


def graph_used_twice(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    found = model(inputs(step))
    found.square().mean().backward(retain_graph=True)
    found.abs().sum().backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Any, step: int) -> None:
    trained = list(model.parameters())
    found = torch.autograd.grad(model(inputs(step)).square().mean(), trained)
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.grad = gradient
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: Any, step: int) -> None:
    """SAM: the gradient at weights nearby, with which the step is taken from where they were."""
    optimizer.zero_grad()
    backward(model, step)
    with torch.no_grad():
        moves = [parameter.grad * 0.05 for parameter in model.parameters() if parameter.grad is not None]
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    (model if step % 2 else optimizer).zero_grad()
    backward(model, step)
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()


def critic(model: nn.Module, optimizer: Any, step: int) -> None:
    """A Wasserstein critic: weights are clamped after each step, and the generator's loss goes through it."""
    usual(model, optimizer, step)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    (-backward_of(model, step)).backward()  # type: ignore[no-untyped-call]


def backward_of(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(inputs(100 + step).requires_grad_()).mean()
    return found


def swapped(model: nn.Module, optimizer: Any, step: int) -> None:
    """Values are replaced late, and the step after is left out."""
    optimizer.zero_grad()
    backward(model, step)
    if step != 7:
        optimizer.step()
    if step == 6:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    if step == 7:
        halved = nn.utils.parameters_to_vector(model.parameters()) * 0.5
        nn.utils.vector_to_parameters(halved, model.parameters())


def thawed(model: nn.Module, optimizer: Any, step: int) -> None:
    model[0].requires_grad_(step >= 3)  # type: ignore[index]
    model[2].requires_grad_(step < 6)  # type: ignore[index]
    optimizer.zero_grad()
    backward(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def cycled(model: nn.Module, optimizer: Any, step: int) -> None:
    if not step:
        optimizer.cycle = OneCycleLR(optimizer, 0.05, total_steps=2 * STEPS)
    usual(model, optimizer, step)
    optimizer.cycle.step()


def averaged(model: nn.Module, optimizer: Any, step: int) -> None:
    if not step:
        optimizer.average = torch.optim.swa_utils.AveragedModel(model)
    usual(model, optimizer, step)
    optimizer.average.update_parameters(model)
    if step == 6:
        model.load_state_dict(optimizer.average.module.state_dict())


def hooked() -> nn.Module:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index,union-attr,operator]
    model[2].weight.register_post_accumulate_grad_hook(halve)  # type: ignore[index,union-attr,operator]
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


LOOPS: dict[str, tuple[Make, Loop]] = {
    "recurrent": (lambda: Recurrent(9, 20, 2), usual),
    "attention": (Attending, looked_at),
    "normed weights": (normed, usual),
    "scalar": (Scaled, looked_at),
    "shortened embeddings": (Words, two_passes),
    "closure": (layers, by_closure),
    "checkpoints": (layers, recomputed),
    "gradient penalty": (layers, penalised),
    "graph of gradients": (layers, with_graph),
    "derivatives of gradients": (layers, curved),
    "graph used twice": (layers, graph_used_twice),
    "gradients by hand": (layers, by_hand),
    "hooks": (hooked, usual),
    "SAM": (layers, sharpness_aware),
    "critic": (layers, critic),
    "swapped": (layers, swapped),
    "thawed": (layers, thawed),
    "averaged": (layers, averaged),
}


def check(make: Make, loop: Loop, kind: Callable[[nn.Module], torch.optim.Optimizer], folder: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    model, twin = models
    optimizer = kind(model)
    train(model, optimizer, range(STEPS), loop)  # type: ignore[arg-type]
    with offloaded(twin, kind(twin), folder, keep_gradients=True) as moved:
        train(twin, moved, range(STEPS), loop)  # type: ignore[arg-type]
        assert weights_equal(model, twin)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_exact(name: str, tmp_path: Path) -> None:
    make, loop = LOOPS[name]
    check(make, loop, adamw, tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2),
        lambda model: torch.optim.Adam(
            model.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True
        ),
        lambda model: torch.optim.Adam(
            model.parameters(), lr=1e-2, weight_decay=0.1, fused=True, amsgrad=True
        ),
        lambda model: torch.optim.SGD(
            model.parameters(), lr=1e-2, momentum=0.9, dampening=0.3, maximize=True
        ),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
    ],
    ids=["named", "decoupled", "fused", "dampened", "fused momentum"],
)
def test_a_cycle_of_rates_and_momentum_is_exact(
    kind: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    check(layers, cycled, kind, tmp_path)


@pytest.mark.parametrize("loop", [sharpness_aware, critic])
def test_loops_that_change_parameters_unseen_are_told_what_it_costs(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = layers()
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(STEPS), loop)  # type: ignore[arg-type]
        assert moved.report()["redone_steps"] == 0
    assert sum("updates are computed after backward from now on" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("step", [1, 6], ids=["early", "late"])
def test_masters_follow_values_that_no_version_tells_of(step: int, tmp_path: Path) -> None:
    """In half precision the master weights count, unless somebody changed the values."""

    def loop(model: nn.Module, optimizer: Any, number: int) -> None:
        plain(model, optimizer, number)
        if number == step:
            for parameter in model.parameters():
                if model is models[0]:
                    parameter.data.mul_(0.5)
                else:
                    with torch.no_grad():
                        parameter.mul_(0.5)

    models = [images_model().bfloat16() for _ in range(2)]
    for number, model in enumerate(models):
        with offloaded(model, adamw(model), tmp_path / str(number)) as moved:
            train(model, moved, range(STEPS), loop)
    assert weights_equal(*models)
