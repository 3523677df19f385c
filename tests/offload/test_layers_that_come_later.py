"""Layers that the measured iteration did not use: networks that grow, and tasks by turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.activation_models import Block
from torch import nn

from hapi.offload.activations.offload import ActivationOffload

MEMORY = 5_000_000


class Growing(nn.Module):
    """Blocks of which a pass uses a few."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(10))
        self.used = range(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.used:
            x = self.blocks[number](x)
        return x


def train(model: Growing, passes: list[range], offload: ActivationOffload | None = None) -> list[int]:
    """Highest saved bytes of each pass."""
    torch.manual_seed(3)
    peaks = []
    for used in passes:
        model.used = used
        if offload is not None:
            offload.reset_peak()
        model(torch.randn(6, 48, 64)).square().mean().backward()
        if offload is not None:
            offload.step_done()
            peaks.append(offload.report()["peak_bytes"])
    return peaks


def twins() -> tuple[Growing, Growing]:
    torch.manual_seed(0)
    model, twin = Growing(), Growing()
    twin.load_state_dict(model.state_dict())
    return model, twin


def test_a_network_that_grows_is_planned_anew(tmp_path: Path) -> None:
    passes = [range(2)] * 3 + [range(10)] * 4
    model, twin = twins()
    train(twin, passes)
    with ActivationOffload(model, MEMORY, [tmp_path]) as offload:
        peaks = train(model, passes, offload)
        report = offload.report()
    assert max(peaks) <= MEMORY
    assert len(report["layers"]) == 10 and report["predicted_peak_bytes"] <= MEMORY
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_tasks_by_turns_are_measured_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is of one task; the other's layers keep no more than in a pass that is measured."""
    measured = []
    start = ActivationOffload._start_measuring
    monkeypatch.setattr(ActivationOffload, "_start_measuring", lambda self: measured.append(1) or start(self))
    passes = [range(2), range(2, 10)] * 5
    model, twin = twins()
    train(twin, passes)
    with ActivationOffload(model, MEMORY, [tmp_path]) as offload:
        peaks = train(model, passes, offload)
    assert max(peaks) <= MEMORY and len(measured) <= 3
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
