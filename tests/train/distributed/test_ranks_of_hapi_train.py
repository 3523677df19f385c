"""``hapi-train`` by several ranks: killed and interrupted ones, other numbers of them, files and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import server
from support.joint_training import ROOT, ForkedRanks, environment, hapi_train, ranks_below, torchrun
from support.local_job import pack_blobs
from support.proxy import gated

pytestmark = pytest.mark.slow

COUNT = 131
EPOCHS = 3
ENOUGH = 40
"""Requests of four ranks for some steps, of an epoch that has eleven."""
MODEL = "support.joint_training:network"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "store"
    pack_blobs(folder, count=COUNT)
    return folder


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with server(store, "--allow-model", MODEL) as running:
        yield running.url


@pytest.fixture(scope="module")
def alone(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The epochs of the job by one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = hapi_train(0, *flags("--server", url, "--output", "alone"), folder=folder)
    assert done.returncode == 0, done.stderr
    return report(folder, "alone")["epochs"]


def flags(*more: str) -> list[str]:
    return [
        "--dataset", "blobs", "--model", MODEL, "--weights", "random", "--freeze", "2", "--split", "2", "--bs", "12",
        "--lr", "0.01", "--optimizer", "adamw", "--threads", "1", "--epochs", str(EPOCHS), "--accumulate", "2",
        "--clip-norm", "1", "--ema", "0.9", "--no-progress", "--checkpoint-every", "1", "--cache", "off", *more,
    ]  # fmt: skip


def report(job: Path, output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / output / "report.json").read_text())
    return found


def wait_for(path: Path, poll: Callable[[], int | None]) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() and poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists(), f"ended with {poll()}"


def check_as_alone(alone: list[dict[str, Any]], report: dict[str, Any]) -> None:
    assert [e["samples"] for e in report["epochs"]] == [COUNT] * EPOCHS
    for own, wanted in zip(report["epochs"], alone, strict=True):
        assert own["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_killed_and_resumed_by_other_numbers_of_ranks(
    url: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    kept = tmp_path / "shared" / "checkpoint.pt"

    def begin(ranks: int, *more: str) -> ForkedRanks:
        return ForkedRanks(ranks, ["hapi.cli.train", *flags(*more)], tmp_path)

    with gated(int(url.rpartition(":")[2]), ENOUGH) as gate:
        process = begin(4, "--output", "shared", "--server", gate.url)
        wait_for(kept, process.poll)
        os.kill(process.pids[2], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
        assert process.returncode != 0
    for ranks in (2, 3):
        process = begin(ranks, "--resume", "shared", "--server", url)
        before = kept.stat().st_mtime_ns
        while process.poll() is None and kept.stat().st_mtime_ns == before:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=240)
    done = hapi_train(0, *flags("--server", url, "--resume", "shared"), folder=tmp_path)
    assert done.returncode == 0, said + done.stderr
    check_as_alone(alone, report(tmp_path, "shared"))


def test_torchrun_starts_the_ranks_again_after_one_died(
    store: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The launcher itself, and the ranks' own embedded server."""
    for output in ("shared", "again", "anew"):  # a job may have ended before its rank is killed
        command = torchrun(
            2, *flags("--store", str(store), "--output", output), options=("--max-restarts", "1")
        )
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(tmp_path / output / "checkpoint.pt", process.poll)
        with suppress(IndexError, OSError):
            os.kill(ranks_below(process)[1], signal.SIGKILL)
        out, said = process.communicate(timeout=240)
        assert process.returncode == 0, out + said
        check_as_alone(alone, report(tmp_path, output))
        assert out.count(f"run   {output}") <= 4 and "rank 1" not in out, "the first rank alone prints"
        if resumes := report(tmp_path, output)["resumes"]:
            break
    assert resumes == 1


def test_states_on_disk_and_checkpoints_by_ranks(url: str, tmp_path: Path) -> None:
    for output, offload in (("memory", ["--offload", "off"]), ("disk", ["--offload", "disk"])):
        done = hapi_train(2, *flags("--server", url, "--output", output, *offload), folder=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = (
        torch.load(tmp_path / output / "checkpoint.pt")["trained"] for output in ("memory", "disk")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not list((tmp_path / "disk").glob("*rank*"))


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
def test_refused_in_one_line(url: str, tmp_path: Path, ranks: int, more: tuple[str, ...], said: str) -> None:
    done = hapi_train(ranks, *flags("--server", url, "--output", "refused", *more), folder=tmp_path)
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("hapi-train:")]
    assert len(own) == 1 and said in own[0], done.stderr
    assert str(ROOT / "hapi") not in done.stderr, "no traceback of ours"
