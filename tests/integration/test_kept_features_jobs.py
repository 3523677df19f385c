"""Whole trainings that share kept features: two at a time, each with a codec of its own for what it keeps, one killed
while it fills and resumed with another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.harness import (
    DIGITS_JOB,
    losses,
    of_epochs,
    packed_digits,
    report_of,
    server,
    start_train,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow
COMMON = (
    *DIGITS_JOB, "--bs", "40", "--request-size", "40", "--split", "5", "--epochs", "3", "--validation", "0.2",
)  # fmt: skip
COUNT, MANY = 200, "6000"
"""Samples; epochs of a job that is killed in one of the first."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


def test_killed_while_filling_and_resumed_beside_another(store: Path, tmp_path: Path) -> None:
    plain, other, report = (tmp_path / f"{name}.json" for name in ("plain", "other", "report"))
    cache, checkpoint = tmp_path / "cache", tmp_path / "training.pt"
    with server(store) as running:
        train(*COMMON, "--server", running.url, "--cache", "off", "--report", str(plain))
        shared = (
            *COMMON,
            "--server",
            running.url,
            "--cache",
            "auto",
            "--cache-dir",
            str(cache),
            "--cache-memory",
            "0",
        )
        kept = ("--checkpoint", str(checkpoint), "--checkpoint-every", "1")
        jobs = [
            start_train(*shared, *kept, "--epochs", MANY, "--cache-codec", "zeros"),
            start_train(*shared, "--report", str(other), "--cache-codec", "zeros+planes"),
        ]
        wait_for(checkpoint.exists, 90, "a checkpoint")
        jobs[0].kill()
        jobs[0].communicate()
        output = jobs[1].communicate(timeout=240)[0]
        assert jobs[1].returncode == 0, output
        assert losses(report_of(other)) == losses(report_of(plain)) and "came from the cache" in output
        # The killed one is as far as it came before this process saw its checkpoint.
        done = torch.load(checkpoint, weights_only=True)["progress"]["epoch"]
        until = ("--epochs", str(max(3, done + 1)))
        train(*shared, *kept, "--resume", *until, "--cache-codec", "none", "--report", str(report))
        if done >= 3:
            train(*COMMON, *until, "--server", running.url, "--cache", "off", "--report", str(plain))
    for figure in ("loss", "validation_loss", "samples"):
        assert of_epochs(report_of(report), figure) == of_epochs(report_of(plain), figure)
    assert of_epochs(report_of(report), "requests")[-1] == 0
    assert of_epochs(report_of(report), "feature_hits")[-1] == COUNT * 0.8
