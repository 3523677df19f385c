"""Training under a control group's cap: with states on disk, and the same loop without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.memory_cap import memory_cap, run_in

pytestmark = pytest.mark.slow

LOOP = """
import sys, torch, hapi
from torch import nn
model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(40)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
if sys.argv[1] == "offload":
    model, optimizer = hapi.offload_training(model, optimizer, memory="800MB", disk=sys.argv[2])
inputs = torch.randn(16, 1500)
for step in range(3):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("trained", sum(p.numel() for p in model.parameters()))
"""
"""90 M parameters: 1.4 GB with AdamW's states and gradients."""


def test_a_model_whose_states_do_not_fit_trains_with_offload_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOP]
    with memory_cap(1300 << 20) as group:
        without = run_in(group, [*command, "plain", str(tmp_path)], tmp_path)
        assert without.returncode == -9 or "memory" in without.stderr, without.stderr
        done = run_in(group, [*command, "offload", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained 90060000" in done.stdout
    assert not any(tmp_path.iterdir())
