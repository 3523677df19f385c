"""Trainings whose states fit the memory: when the plan of their activations ends."""

from __future__ import annotations

from typing import Any

import torch
from support.activation_models import SmallGpt, gpt_loss

import hapi


def state_of(optimizer: Any) -> str:
    state: str = optimizer.report()["activations"]["state"]
    return state


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    gpt_loss(model).backward()
    optimizer.step()
    gpt_loss(model)


def given(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return hapi.offload_training(model, optimizer, memory="8GB")[1]


def test_a_training_that_is_given_again_is_measured_anew() -> None:
    """As where a cell of a notebook runs a second time."""
    model = SmallGpt(depth=1)
    optimizer = given(model, torch.optim.AdamW(model.parameters()))
    step(model, optimizer)
    assert state_of(optimizer) == "planned"
    optimizer = given(model, optimizer)
    assert state_of(optimizer) == "measuring"
    optimizer = torch.optim.AdamW(model.parameters())  # the one before is gone
    optimizer = given(model, optimizer)
    assert state_of(optimizer) == "measuring"
    step(model, optimizer)
    assert state_of(optimizer) == "planned"


def test_one_that_is_closed_leaves_the_model_as_it_was() -> None:
    model = SmallGpt(depth=1)
    optimizer: Any = given(model, torch.optim.AdamW(model.parameters()))
    step(model, optimizer)
    optimizer.close()
    optimizer.close()
    assert state_of(optimizer) == "kept" and not model._forward_hooks
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_plan_of_an_optimizer_in_use_goes_on() -> None:
    model = SmallGpt(depth=1)
    first, second = (given(model, torch.optim.AdamW(model.parameters())) for _ in range(2))
    step(model, first)
    assert (state_of(first), state_of(second)) == ("planned", "kept")
