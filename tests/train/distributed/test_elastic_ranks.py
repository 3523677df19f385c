"""An elastic job of torchrun (``--nnodes 1:2``): a machine that joins shares the epoch that is under way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.free_ports import free_port
from support.harness import server, wait_for
from support.joint_training import TORCHRUN, TRAIN, environment, hapi_train
from support.local_job import pack_blobs

COUNT = 131
JOB = (
    "--dataset", "blobs", "--model", "support.joint_training:network", "--weights", "random", "--freeze", "2",
    "--split", "2", "--bs", "12", "--lr", "0.01", "--threads", "1", "--no-progress", "--checkpoint-every", "1",
    "--cache", "off",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_machine_that_joins_shares_the_epoch(tmp_path: Path) -> None:
    store, kept = tmp_path / "store", tmp_path / "shared" / "checkpoint.pt"
    said = tmp_path / "said"
    pack_blobs(store, count=COUNT)
    command = [
        *(word for word in TORCHRUN if word != "--standalone"), "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--no-python", sys.executable, "-c", TRAIN,
    ]  # fmt: skip

    def joins(url: str) -> subprocess.Popen[bytes]:
        """Start the launcher of one machine."""
        with said.open("ab") as out:
            return subprocess.Popen(
                [*command, *JOB, "--server", url, "--output", "shared", "--epochs", "100000"],
                cwd=tmp_path,
                env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=out,
                stderr=out,
            )

    with server(store, "--allow-model", "support.joint_training:network") as running:
        machines = [joins(running.url)]
        try:
            wait_for(kept.exists, 100)
            machines.append(joins(running.url))
            wait_for(lambda: "6 on each of 2 ranks" in said.read_text(), 150)
            wait_for(lambda: torch.load(kept)["totals"]["resumes"] == 1, 60)
        finally:
            for machine in machines:  # ranks outlive a launcher that is killed
                machine.send_signal(signal.SIGTERM)
            for machine in machines:
                machine.wait(240)
        epochs = len(torch.load(kept)["epochs"]) + 2
        more = ("--server", running.url, "--resume", "shared", "--epochs", str(epochs))
        done = hapi_train(0, *JOB, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "shared" / "report.json").read_text())
    assert [epoch["samples"] for epoch in report["epochs"]] == [COUNT] * epochs
