"""Ranks that hang, and ranks that were started wrongly by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.disks import small_disk
from support.forked import ForkedProcess
from support.free_ports import free_port
from support.harness import server, start_train
from support.harness import wait_for as until
from support.joint_training import TORCHRUN, ForkedRanks, environment, hapi_train, ranks_below, torchrun
from support.local_job import pack_blobs

pytestmark = pytest.mark.slow

COUNT, EPOCHS = 131, 4
MODEL = "support.joint_training:network"
IMPATIENT = (
    "import sys; from hapi.cli.shared import ranks; ranks.longest_stall = lambda settings: 30.0; "
    "from hapi.cli.entry import train; sys.exit(train())"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lost") / "store"
    pack_blobs(folder, count=COUNT)
    with server(folder, "--allow-model", MODEL) as running:
        yield running.url


def flags(url: str, *more: str) -> list[str]:
    return [
        "--server", url, "--dataset", "blobs", "--model", MODEL, "--weights", "random", "--freeze", "2", "--split", "2",
        "--bs", "12", "--lr", "0.01", "--threads", "1", "--epochs", str(EPOCHS), "--no-progress",
        "--cache", "off", *more,
    ]  # fmt: skip


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def written(run: Path, poll: Callable[[], int | None]) -> None:
    """Wait for the run's first checkpoint."""
    until(lambda: (run / "checkpoint.pt").exists() or poll() is not None, 200, "a checkpoint")
    assert poll() is None


def test_a_rank_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    ranks = ForkedRanks(3, ["support.exchanging_ranks"], tmp_path)
    try:
        said = lambda: ranks.output().splitlines()  # noqa: E731
        until(lambda: said() == ["met"] * 3, 60, "ranks that exchange")
        os.kill(ranks.pids[1], signal.SIGSTOP)
        until(lambda: len(said()) == 5, 60, "lines of the other two")
    finally:
        ranks.send_signal(signal.SIGKILL)
        out, _ = ranks.communicate(240)
    lines = sorted(line for line in out.splitlines() if line != "met")
    assert [line[:7] for line in lines] == ["rank 0:", "rank 2:"]
    assert all("rank 1 of 3 did not answer: it has ended or hangs" in line for line in lines), out


@pytest.mark.long
def test_torchrun_starts_the_ranks_again_after_one_hung(url: str, tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--nproc-per-node", "3", "--max-restarts", "1", "--no-python"]
    process = subprocess.Popen(
        [*launcher, sys.executable, "-c", IMPATIENT, *flags(url, "--output", "run", "--checkpoint-every", "1")],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    written(tmp_path / "run", process.poll)
    stopped = ranks_below(process)[1]
    os.kill(stopped, signal.SIGSTOP)
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.startswith("hapi-train:"))
    os.kill(stopped, signal.SIGCONT)  # torchrun would kill it too, 30 s later
    assert "rank 1 of 3 did not answer: it has ended or hangs" in said
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    found = report(tmp_path / "run")
    assert found["resumes"] == 1 and [e["samples"] for e in found["epochs"]] == [COUNT] * EPOCHS


@pytest.mark.long
def test_ranks_stop_with_a_checkpoint_when_torchrun_is_killed(url: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        torchrun(2, *flags(url, "--output", "run", "--checkpoint-every", "5", "--epochs", "9999")),
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    written(tmp_path / "run", process.poll)
    ranks = ranks_below(process)
    try:
        process.kill()
        _, said = process.communicate(timeout=240)  # the ranks have its stderr, too
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
    own = [line for line in said.splitlines() if line.startswith("hapi-train:")]
    assert own[0] == "hapi-train: torchrun is gone, maybe killed: its ranks stop as after SIGTERM", said
    assert report(tmp_path / "run")["ended"]["how"] == "interrupted", said


def test_bytes_of_an_interrupted_epoch_are_those_of_all_ranks(url: str, tmp_path: Path) -> None:
    """Stopped in an epoch and gone on with by one process: as many bytes as in an epoch that nothing cut."""
    more = ("--bs", "6", "--epochs", "400", "--checkpoint-every", "15")
    ranks = ForkedRanks(3, ["hapi.cli.train", *flags(url, "--output", "run", *more)], tmp_path)
    written(tmp_path / "run", ranks.poll)
    ranks.send_signal(signal.SIGTERM)
    _, said = ranks.communicate(240)
    stopped = report(tmp_path / "run")["ended"]
    assert stopped["how"] == "interrupted", said
    last = str(stopped["epoch"] + 2)
    done = hapi_train(0, *flags(url, "--resume", "run", *more, "--epochs", last), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, cut, whole = report(tmp_path / "run")["epochs"]
    assert cut["bytes_received"] >= 0.9 * whole["bytes_received"]


def start_rank(rank: int, port: int, url: str, *more: str, **env: str) -> ForkedProcess:
    """A rank of two, as a launcher of one's own starts it."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start_train(*flags(url), *more, **{**variables, **env})


def check_line(output: str, said: str) -> None:
    own = [line for line in output.splitlines() if line.startswith("hapi-train:")]
    assert len(own) == 1 and said in own[0] and "Traceback" not in output, output


def test_two_jobs_on_one_port_and_a_host_that_is_not_there(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        output, _ = (second := start_rank(0, other.getsockname()[1], url)).communicate(240)
    assert second.wait() == 2
    check_line(output, "another process listens there, maybe another job's; give each job a port of its own")
    lost = start_rank(0, free_port(), url, MASTER_ADDR="x" * 64)
    output, _ = lost.communicate(240)
    assert lost.wait() == 2
    check_line(output, "there is no such host; give the address of the first rank's machine")


def test_ranks_with_different_arguments(url: str) -> None:
    port = free_port()
    ranks = [start_rank(rank, port, url, "--lr", f"0.{rank + 1}") for rank in range(2)]
    try:
        output, _ = ranks[0].communicate(240)
        assert ranks[0].wait() == 2
        check_line(output, "rank 1 has --lr 0.2 and the first one 0.1: give all ranks the same settings")
    finally:
        ranks[1].kill()


def test_a_full_disk_under_a_checkpoint_of_ranks(url: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", 16) as full:
        more = ("--output", str(full / "run"), "--epochs", "2", "--patience", "1")
        done = hapi_train(2, *flags(url, *more), folder=tmp_path)
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("hapi-train: error")]
    assert len(own) == 1 and "No space left on device" in own[0], done.stderr
    assert str(Path("hapi", "train")) not in done.stderr, "no traceback of ours"
