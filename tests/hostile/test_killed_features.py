"""All features of the trainer's steps together, in a process that is killed: the resumed one ends bitwise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import ServerProcess, losses, packed_digits, report_of, start_train, train, wait_for

pytestmark = pytest.mark.slow
JOB = (
    "--freeze", "13", "--weights", "random", "--epochs", "6", "--bs", "20", "--no-progress", "--split", "freeze",
    "--schedule", "one-cycle", "--warmup", "1.5ep", "--clip-norm", "5", "--accumulate", "3", "--ema", "0.9",
    "--precision", "fp16", "--head-lr", "0.02", "--optimizer", "adamw", "--weight-decay", "0.01",
    "--no-decay-norm-bias", "--class-weights", "balanced", "--label-smoothing", "0.1", "--checkpoint-every", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), 200)


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {k: t for key, value in items for k, t in tensors_of(value, f"{name}.{key}").items()}


def test_killed_and_resumed(running: ServerProcess, tmp_path: Path) -> None:
    whole, path, report = (tmp_path / name for name in ("whole.pt", "training.pt", "report.json"))
    given = ("--server", running.url, *JOB, "--report", str(report))
    train(*given, "--checkpoint", str(whole))
    expected = losses(report_of(report))
    job = start_train(*given, "--checkpoint", str(path))
    try:
        wait_for(path.exists, 60, "a checkpoint")
    finally:
        job.kill()
        job.wait()
    train("--resume", "--checkpoint", str(path))
    assert losses(report_of(report)) == expected
    ours, theirs = (torch.load(file, weights_only=True) for file in (path, whole))
    assert ours["progress"]["epoch"] == theirs["progress"]["epoch"] == 6
    for part in ("trained", "optimizer", "step"):
        found, want = tensors_of(ours[part]), tensors_of(theirs[part])
        assert found.keys() == want.keys() and want
        assert all(torch.equal(found[name], value) for name, value in want.items()), part
    assert ours["step"]["precision"] == theirs["step"]["precision"]
