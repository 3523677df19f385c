"""``hapi-train`` with its embedded server under a control group's cap, with states on disk and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.local_job import pack_blobs
from support.memory_cap import memory_cap, run_in

pytestmark = [pytest.mark.slow, pytest.mark.long]

NETWORK = """
from torch import nn

def network(num_classes=4, side=2600, count=13):
    layers = [nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, side), nn.ReLU()]
    for _ in range(count):
        layers += [nn.Linear(side, side), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(side, num_classes))
"""
"""89 M parameters: 1.4 GB with AdamW's states and gradients."""


def test_a_job_that_does_not_fit_trains_with_its_states_on_disk(tmp_path: Path) -> None:
    (tmp_path / "wide_network.py").write_text(NETWORK)
    pack_blobs(tmp_path / "store", count=24)
    command = [
        sys.executable, "-c", "import sys; from hapi.cli.entry import train; sys.exit(train())",
        "--store", "store", "--dataset", "blobs", "--model", "wide_network:network", "--weights", "random",
        "--freeze", "2", "--bs", "12", "--threads", "1", "--no-progress", "--optimizer", "adamw", "--lr", "1e-4",
        "--epochs", "1", "--no-output",
    ]  # fmt: skip
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with memory_cap(2000 << 20) as group:
        killed = run_in(group, [*command, "--offload", "off", "--memory", "8GB"], tmp_path, **home)
        assert killed.returncode == -9, killed.stderr
        done = run_in(group, [*command, "--offload-dir", "s", "--report", "report.json"], tmp_path, **home)
    assert done.returncode == 0, done.stderr
    assert "offload: the training does not fit" in done.stderr + done.stdout
    facts = json.loads((tmp_path / "report.json").read_text())["offload"]
    assert facts["where"] == "disk" and facts["cost"]["steps"] == 2
    assert list((tmp_path / "s").iterdir()) == []
