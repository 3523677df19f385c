"""Ranks with caches of their own, one on a full disk, and ranks that end while the last checkpoint is written."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.disks import small_disk
from support.harness import server
from support.harness import wait_for as until
from support.joint_training import ForkedRanks, hapi_train
from support.local_job import pack_blobs
from support.proxy import gated

pytestmark = pytest.mark.slow

COUNT, TRAINED, EPOCHS = 131, 105, 3
MODEL = "support.joint_training:network"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("options") / "store"
    pack_blobs(folder, count=COUNT)
    with server(folder, "--allow-model", MODEL) as running:
        yield running.url


def flags(*more: str) -> list[str]:
    return [
        "--dataset", "blobs", "--model", MODEL, "--weights", "random", "--freeze", "2", "--bs", "12", "--lr", "0.01",
        "--optimizer", "adamw", "--threads", "1", "--accumulate", "2", "--clip-norm", "1", "--ema", "0.9",
        "--schedule", "cosine", "--no-progress", "--checkpoint-every", "1", "--validation", "0.2", *more,
    ]  # fmt: skip


STOPS = ("--epochs", "9", "--early-stopping", "2", "--min-improvement", "50")
"""No accuracy is ever better by 50: training stops after three epochs."""


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def check_as_alone(url: str, folder: Path, run: str, *more: str) -> None:
    done = hapi_train(0, *flags("--server", url, "--output", "alone", "--cache", "off", *more), folder=folder)
    assert done.returncode == 0, done.stderr
    ours, wanted = report(folder / run), report(folder / "alone")
    assert ours["ended"] == wanted["ended"]
    assert [e["samples"] for e in ours["epochs"]] == [TRAINED] * EPOCHS
    for own, one in zip(ours["epochs"], wanted["epochs"], strict=True):
        for figure in ("loss", "validation_loss"):
            assert own[figure] == pytest.approx(one[figure], rel=1e-5)
        assert own["validation_accuracy"] == pytest.approx(one["validation_accuracy"], abs=1e-12)


def test_ranks_with_caches_of_their_own_go_on_in_other_numbers(url: str, tmp_path: Path) -> None:
    """Machines that share no cache: each rank knows other features, and one can keep none."""
    kept = tmp_path / "run" / "checkpoint.pt"
    with small_disk(tmp_path / "full", 1200) as full:
        (full / "taken").write_bytes(bytes(1 << 20))

        def caches(rank: int) -> Mapping[str, str]:
            return {"HAPI_TRAIN_CACHE_DIR": str(full / "cache" if rank == 1 else tmp_path / f"cache{rank}")}

        def begun(ranks: int, *more: str) -> ForkedRanks:
            return ForkedRanks(
                ranks, ["hapi.cli.train", *flags("--cache", "on", *STOPS, *more)], tmp_path, caches
            )

        with gated(int(url.rpartition(":")[2]), 30) as gate:
            first = begun(4, "--output", "run", "--server", gate.url)
            until(lambda: kept.exists() or first.poll() is not None, 240, "a checkpoint")
            first.send_signal(signal.SIGTERM)
            gate.open()
            _, said = first.communicate(240)
        assert first.returncode == 130, f"{first.codes} {said}"
        second = begun(2, "--resume", "run", "--server", url)
        before = kept.stat().st_mtime_ns
        until(lambda: second.poll() is not None or kept.stat().st_mtime_ns != before, 240, "a step")
        second.send_signal(signal.SIGTERM)
        _, said = second.communicate(240)
        if second.returncode:  # it may have ended before it heard
            third = begun(3, "--resume", "run", "--server", url)
            _, said = third.communicate(240)
            assert third.returncode == 0, said
    check_as_alone(url, tmp_path, "run", *STOPS)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed_while_the_last_checkpoint_is_written(victim: int, url: str, tmp_path: Path) -> None:
    job = flags("--server", url, "--epochs", str(EPOCHS), "--cache", "off")
    command = ["support.held_saving", str(EPOCHS), *job, "--output", "run"]
    ranks = ForkedRanks(3, command, tmp_path)
    until(lambda: (tmp_path / "saving").exists() or ranks.poll() is not None, 240, "the last checkpoint")
    with suppress(ProcessLookupError):  # others may have ended: their work is done
        os.kill(ranks.pids[victim], signal.SIGKILL)
    until(lambda: ranks.codes[victim] is not None, 240, "its end")
    if (
        victim and ranks.poll() is None and not ranks.returncode
    ):  # the others get SIGTERM as soon as one has failed
        os.kill(ranks.pids[0], signal.SIGTERM)
    (tmp_path / "go-on").touch()
    _, said = ranks.communicate(240)
    if victim == 0:
        assert ranks.returncode == -signal.SIGKILL
        done = hapi_train(2, *job, "--resume", "run", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        assert ranks.codes[0] == 0, said
    assert (tmp_path / "run" / "model.safetensors").exists()
    check_as_alone(url, tmp_path, "run", "--epochs", str(EPOCHS))
