"""Bytes and seconds of offloaded states against the paper's figures and torch's own optimisers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hapi.profiler.offload_costs import BUFFER_BYTES, STATES, OffloadCosts, fitting_freeze, free_batch


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("sgd with momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("sgd", lambda p: torch.optim.SGD(p)),
    ],
)
def test_memory_is_what_torch_holds_after_a_step(name: str, make: object) -> None:
    layers = nn.Linear(64, 32)
    optimizer = make(layers.parameters())  # type: ignore[operator]
    layers(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    held = sum(p.nbytes + p.grad.nbytes for p in layers.parameters() if p.grad is not None)
    for state in optimizer.state.values():
        held += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    costs = OffloadCosts(parameters=64 * 32 + 32, states=STATES[name])
    assert costs.memory_without == held


def test_adamw_as_the_paper_counts_it() -> None:
    half = OffloadCosts(parameters=10, states=2, half=True)
    assert (half.read, half.written, half.memory_without) == (120, 120, 160)
    whole = OffloadCosts(parameters=10, states=2)
    assert (whole.read, whole.written, whole.disk_bytes, whole.memory_without) == (80, 120, 240, 160)


def test_memory_with_offloading_keeps_parameters_and_a_bounded_rest() -> None:
    costs = OffloadCosts(parameters=10**9, states=2, drives=2, largest=10**7)
    assert costs.memory_with == 4 * 10**9 + (64 << 20) + 2 * BUFFER_BYTES
    assert costs.saved == costs.memory_without - costs.memory_with
    assert OffloadCosts(parameters=1000, states=2).saved == 0


def test_seconds_hide_behind_the_step() -> None:
    costs = OffloadCosts(parameters=10**8, states=2)
    assert costs.transfer_seconds(8e8, 1.2e9) == pytest.approx(2.0)
    assert costs.added_seconds(8e8, 1.2e9, 1.5) == pytest.approx(0.5)
    assert costs.added_seconds(8e8, 1.2e9, 3.0) == 0
    assert free_batch(32, 1.5, 2.0) == 43
    assert free_batch(32, 3.0, 2.0) == 32


def test_the_freeze_that_fits() -> None:
    weights = [1000, 500, 0, 10]
    assert fitting_freeze(weights, 0, 2, 16 * 1510) == 0
    assert fitting_freeze(weights, 0, 2, 16 * 510) == 1
    assert fitting_freeze(weights, 0, 2, 16 * 509) == 2
    assert fitting_freeze(weights, 0, 2, 100) is None
