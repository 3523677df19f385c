"""Gradients in tensors that the loop made: they stay where they are, and count as they are at the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import offloaded, train, weights_equal
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hapi.errors import UsageError
from hapi.offload.training import offload_training

STEPS = 9
Run = Callable[[Any, Any], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    rows = torch.randn(8, 9, generator=torch.Generator().manual_seed(step))
    found: torch.Tensor = model(rows).tanh().square().mean()
    return found


def into_one_tensor(model: nn.Module) -> torch.Tensor:
    flat = torch.zeros(sum(one.numel() for one in model.parameters()))
    at = 0
    for one in model.parameters():
        one.grad = flat[at : at + one.numel()].view_as(one)
        at += one.numel()
    return flat


def flat(model: Any, optimizer: Any) -> Any:
    gradients = into_one_tensor(model)
    for step in range(STEPS):
        gradients.zero_()
        loss(model, step).backward()
        gradients.mul_((0.01 / gradients.norm()).clamp(max=1.0))
        optimizer.step()
    return gradients


def flat_accumulated(model: Any, optimizer: Any) -> None:
    gradients = into_one_tensor(model)
    for step in range(STEPS):
        for part in range(2):
            loss(model, 2 * step + part).backward()
        optimizer.step()
        gradients.zero_()


def flat_late(model: Any, optimizer: Any) -> None:
    gradients = torch.zeros(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step >= 5:
            gradients = into_one_tensor(model)
        loss(model, step).backward()
        gradients.mul_(0.5)
        optimizer.step()


def set_once(model: Any, optimizer: Any) -> None:
    """Evolution: the gradient is an estimate, written to tensors that stay."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    kept = [one.grad for one in model.parameters()]
    for step in range(STEPS):
        with torch.no_grad():
            for gradient in kept:
                gradient.copy_(torch.full_like(gradient, 0.01 * step))
        optimizer.step()


def transposed_and_clipped(model: Any, optimizer: Any) -> list[float]:
    """The order in memory decides on the last bits of a norm."""
    found = []
    for step in range(STEPS):
        slopes = torch.autograd.grad(loss(model, step), list(model.parameters()))
        for one, slope in zip(model.parameters(), slopes, strict=True):
            one.grad = slope.t().contiguous().t() if slope.dim() > 1 else slope
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
        found += [float(one.grad.sum()) for one in model.parameters()]
    return found


def made_before(model: Any, optimizer: Any) -> None:
    """Gradients that nobody else uses are taken over."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss(model, step).backward()
        optimizer.step()


def thawed(model: Any, optimizer: Any) -> None:
    """Layers that were frozen when the optimizer was handed over are followed too."""
    for step in range(STEPS):
        model[0].requires_grad_(step >= 3)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "run", [flat, flat_accumulated, flat_late, set_once, transposed_and_clipped, made_before, thawed]
)
def test_steps_are_those_in_memory(run: Run, tmp_path: Path) -> None:
    model, twin = layers(), layers()
    if run is thawed:
        model[0].requires_grad_(False)
        twin[0].requires_grad_(False)
    expected = run(model, adamw(model))
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        found = run(twin, moved)
        assert weights_equal(model, twin)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_hooks_of_all_optimizers_are_called_once_a_step(tmp_path: Path) -> None:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    model = layers()
    try:
        with offloaded(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), tmp_path) as moved:
            set_once(model, moved)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"] * STEPS


def test_a_step_that_was_replaced_is_refused(tmp_path: Path) -> None:
    model = layers()
    optimizer: Any = adamw(model)
    before = optimizer.step
    optimizer.step = lambda: before()
    with pytest.raises(UsageError, match="step of this optimizer was replaced by another function"):
        offload_training(model, optimizer, "1B", tmp_path)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_scaler_leaves_its_scale_to_a_fused_step(kind: Any, clips: bool, tmp_path: Path) -> None:
    """Which divides by it: a product with its inverse has other last bits, unless it is a power of two."""

    def loop(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        factor = float("inf") if step in (1, 6) else 1.0
        scaler.scale(loss(model, step) * factor).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()

    models = [layers(), layers()]
    for model in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
        optimizer = kind(model.parameters(), lr=1e-2, fused=True)
        if model is models[0]:
            train(model, optimizer, range(STEPS), loop)
            continue
        with offloaded(model, optimizer, tmp_path) as moved:
            train(model, moved, range(STEPS), loop)
    assert weights_equal(*models)
