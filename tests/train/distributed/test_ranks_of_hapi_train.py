"""``hapi-train`` under torchrun: killed and interrupted ranks, other numbers of them, files and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.joint_training import ROOT, environment, hapi_train
from support.local_job import pack_blobs

pytestmark = pytest.mark.slow

COUNT = 131
EPOCHS = 3


@pytest.fixture
def job(tmp_path: Path) -> Path:
    pack_blobs(tmp_path / "store", count=COUNT)
    return tmp_path


def flags(*more: str) -> list[str]:
    return [
        "--store", "store", "--dataset", "blobs", "--model", "support.joint_training:network", "--weights", "random",
        "--freeze", "2", "--split", "2", "--bs", "12", "--lr", "0.01", "--optimizer", "adamw", "--threads", "1",
        "--epochs", str(EPOCHS), "--accumulate", "2", "--clip-norm", "1", "--ema", "0.9", "--no-progress",
        "--checkpoint-every", "1", "--cache", "off", *more,
    ]  # fmt: skip


def run(job: Path, ranks: int, *more: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        hapi_train(ranks, *flags(*more), options=options),
        cwd=job, env=environment(), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def report(job: Path, output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / output / "report.json").read_text())
    return found


def begin(job: Path, ranks: int, *more: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        hapi_train(ranks, *flags(*more), options=options),
        cwd=job, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists(), process.communicate(timeout=30)


def ranks_below(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks of torchrun, in their order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((v for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank.removeprefix(b"RANK="))] = child
    return [found[rank] for rank in sorted(found)]


def check_as_alone(job: Path, output: str) -> None:
    one = report(job, "alone")
    ours = report(job, output)
    assert [e["samples"] for e in ours["epochs"]] == [COUNT] * EPOCHS
    for own, wanted in zip(ours["epochs"], one["epochs"], strict=True):
        assert own["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_killed_and_resumed_by_other_numbers_of_ranks(job: Path) -> None:
    assert run(job, 0, "--output", "alone").returncode == 0
    process = begin(job, 4, "--output", "shared")
    wait_for(job / "shared" / "checkpoint.pt", process)
    os.kill(ranks_below(process)[2], signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0
    for ranks in (2, 3):
        process = begin(job, ranks, "--resume", "shared")
        before = (job / "shared" / "checkpoint.pt").stat().st_mtime_ns
        while process.poll() is None and (job / "shared" / "checkpoint.pt").stat().st_mtime_ns == before:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    done = run(job, 0, "--resume", "shared")
    assert done.returncode == 0, said + done.stderr
    check_as_alone(job, "shared")


def test_torchrun_starts_the_ranks_again_after_one_died(job: Path) -> None:
    assert run(job, 0, "--output", "alone").returncode == 0
    process = begin(job, 2, "--output", "shared", options=("--max-restarts", "1"))
    wait_for(job / "shared" / "checkpoint.pt", process)
    os.kill(ranks_below(process)[1], signal.SIGKILL)
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, out + said
    assert report(job, "shared")["resumes"] == 1
    check_as_alone(job, "shared")
    assert out.count("run   shared") <= 4 and "rank 1" not in out, "the first rank alone prints"


def test_states_on_disk_and_checkpoints_by_ranks(job: Path) -> None:
    for output, offload in (("memory", ["--offload", "off"]), ("disk", ["--offload", "disk"])):
        done = run(job, 2, "--output", output, *offload)
        assert done.returncode == 0, done.stderr
    first, second = (torch.load(job / output / "checkpoint.pt")["trained"] for output in ("memory", "disk"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not (job / "disk" / "rank0").exists() or not list((job / "disk" / "rank0").iterdir())


@pytest.mark.parametrize(
    ("ranks", "more", "said"),
    [
        (0, ("--trainers", "2"), "start torchrun --no-python --nproc-per-node 2 hapi-train"),
        (2, ("--batches", "1"), "unknown argument --batches"),
        (2, ("--bs", "1"), "has fewer samples than the 2 ranks"),
        (2, ("--device", "cuda:0"), "every rank takes a GPU of its own"),
        (2, ("--sync-batchnorm",), "between GPUs, not on a CPU"),
        (0, ("--sync-batchnorm",), "needs several ranks"),
        (2, ("--dataset", "none"), "no dataset"),
    ],
)
def test_refused_in_one_line(job: Path, ranks: int, more: tuple[str, ...], said: str) -> None:
    done = run(job, ranks, "--output", "refused", *more)
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("hapi-train:")]
    assert len(own) == 1 and said in own[0], done.stderr
    assert str(ROOT / "hapi") not in done.stderr, "no traceback of ours"
