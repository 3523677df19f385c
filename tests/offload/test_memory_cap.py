"""Training under a control group's cap: with states on disk, and the same loop without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CAP = 1300 << 20
LOOP = """
import sys, torch, hapi
from torch import nn
model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(40)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
if sys.argv[1] == "offload":
    model, optimizer = hapi.offload_training(model, optimizer, memory="800MB", disk=sys.argv[2])
inputs = torch.randn(16, 1500)
for step in range(5):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("trained", sum(p.numel() for p in model.parameters()))
"""
"""90 M parameters: 1.4 GB with AdamW's states and gradients."""


@pytest.fixture
def capped() -> Iterator[Path]:
    """A control group of this test with a cap on memory."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    group = (root / "memory" if is_first else root) / f"hapi-offload-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(CAP))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:  # its last process is being taken away
            time.sleep(0.1)


def run(way: str, group: Path, disk: Path) -> subprocess.CompletedProcess[str]:
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    command = ["sh", "-c", enter, str(group), sys.executable, "-c", LOOP, way, str(disk)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_a_model_whose_states_do_not_fit_trains_with_offload_alone(capped: Path, tmp_path: Path) -> None:
    without = run("plain", capped, tmp_path)
    assert without.returncode == -9 or "memory" in without.stderr, without.stderr
    done = run("offload", capped, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained 90060000" in done.stdout
    assert not any(tmp_path.iterdir())
