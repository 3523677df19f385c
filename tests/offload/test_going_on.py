"""What a killed job left: found whatever memory is free now, with buffers that layers replace, and counted right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import (
    groups_of,
    images_model,
    offloaded,
    plain,
    states_equal,
    tied_model,
    train,
    weights_equal,
)
from torch import nn

from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.pieces import plan_pieces
from hapi.offload.states.host import HostStates
from hapi.offload.training import offload_training


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def left_behind(folder: Path, steps: int) -> nn.Module:
    """Train some steps, and leave as a killed process does."""
    model = images_model()
    moved = offloaded(model, adamw(model), folder)
    train(model, moved, range(steps), plain)
    moved.close(remove=False)
    return model


def test_a_killed_job_goes_on_although_all_fits_now(tmp_path: Path) -> None:
    """How much memory is free differs from start to start."""
    left_behind(tmp_path, 4)
    model, twin = images_model(), images_model()
    optimizer = adamw(model)
    train(model, optimizer, range(7), plain)
    with offloaded(twin, adamw(twin), tmp_path, memory="1GB") as moved:
        assert moved.steps == 4
        train(twin, moved, range(4, 7), plain)
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())
    assert not any(tmp_path.iterdir())


def test_folders_of_others_are_left_alone_where_all_fits(tmp_path: Path) -> None:
    def stays_in_memory(model: nn.Module, folder: Path) -> bool:
        _, made = offload_training(model, adamw(model), "1GB", folder, activations="keep")
        return not isinstance(made, OffloadedOptimizer)

    left_behind(tmp_path / "of another job", 3)
    assert stays_in_memory(tied_model(), tmp_path / "of another job")
    assert (tmp_path / "of another job" / "hapi-offload" / "states").exists()
    left_behind(tmp_path / "without a step", 0)
    assert stays_in_memory(images_model(), tmp_path / "without a step")
    assert stays_in_memory(images_model(), tmp_path / "new")
    living = images_model()
    with offloaded(living, adamw(living), tmp_path / "in use") as moved:
        train(living, moved, range(2), plain)
        assert stays_in_memory(images_model(), tmp_path / "in use")


class Replaced(nn.Module):
    """Statistics in a buffer that each pass replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 40)
        self.register_buffer("average", torch.zeros(40))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(values)
        self.average = 0.9 * self.average + 0.1 * found.detach().mean(0)
        return torch.tanh(found - self.average)


class Grows(Replaced):
    """Its buffer has another shape after the first pass."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.average.dim() == 1:
            self.average = self.average.expand(3, 40).clone()
        found: torch.Tensor = self.inner(values)
        return found + self.average[0]


def replacing_model(kind: type[nn.Module] = Replaced) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(9, 40), kind(), kind(), nn.Linear(40, 3))


def numbers(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 9, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    optimizer.step()


def test_buffers_that_a_layer_replaces_go_on(tmp_path: Path) -> None:
    model, killed, twin = (replacing_model() for _ in range(3))
    train(model, adamw(model), range(6), numbers)
    before = offloaded(killed, adamw(killed), tmp_path)
    train(killed, before, range(3), numbers)
    before.close(remove=False)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        assert weights_equal(killed, twin)
        train(twin, moved, range(3, 6), numbers)
        assert weights_equal(model, twin)


def test_buffers_that_inference_made_go_on(tmp_path: Path) -> None:
    """They have no version."""
    with torch.inference_mode():
        made = torch.ones(3)
    killed, twin = images_model(), images_model()
    for model in (killed, twin):
        model.register_buffer("made", made if model is killed else torch.zeros(3))
    before = offloaded(killed, adamw(killed), tmp_path)
    train(killed, before, range(3), plain)
    before.close(remove=False)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        assert moved.steps == 3
        assert weights_equal(killed, twin)


def test_a_buffer_of_another_shape_is_not_kept_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = replacing_model(Grows), replacing_model(Grows)
    before = offloaded(model, adamw(model), tmp_path)
    train(model, before, range(3), numbers)
    before.close(remove=False)
    said = [record.message for record in caplog.records if "1.average" in record.message]
    assert len(said) == 1 and "begins with its first values" in said[0]
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        assert moved.steps == 3
        assert torch.equal(twin[1].average, torch.zeros(40))  # type: ignore[index,arg-type]
        train(twin, moved, range(3, 5), numbers)


def test_states_that_are_loaded_do_not_count_steps_that_sgd_does_not_tell(tmp_path: Path) -> None:
    """Accelerate loads an optimiser's own states into it when it prepares it."""
    model = images_model()
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), tmp_path) as moved:
        train(model, moved, range(5), plain)
        moved.load_state_dict(moved.state_dict())
        assert moved.steps == 5


def test_ranks_with_states_in_host_memory_begin() -> None:
    states = HostStates(plan_pieces([]), 0)
    assert states.go_back(0), "nothing is the state of step 0"
    assert not states.go_back(3)
