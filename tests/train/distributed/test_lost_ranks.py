"""Ranks that hang, and ranks that were started wrongly by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.disks import small_disk
from support.forked import ForkedProcess
from support.harness import DIGITS_JOB, packed_digits, start_train
from support.joint_training import environment, hapi_train, ranks_below, torchrun

pytestmark = pytest.mark.slow

EXCHANGING = """
import sys, time, torch
from hapi.errors import OtherRankError
from hapi.train.distributed.group import ProcessGroup
from hapi.train.distributed.launch import launched
launch = launched()
try:
    with ProcessGroup(launch, torch.device("cpu"), silence=3) as ranks:
        print("met", flush=True)
        while True:
            ranks.summed(torch.ones(1))
            time.sleep(0.01)
except OtherRankError as error:
    print(f"rank {launch.rank}: {error}", flush=True)
    sys.exit(1)
"""


def test_a_rank_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    process = subprocess.Popen(
        torchrun(3, "--no-python", sys.executable, "-c", EXCHANGING),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "met\n"
    stopped = ranks_below(process)[1]
    os.kill(stopped, signal.SIGSTOP)
    said = [process.stdout.readline() for _ in range(2)]
    os.kill(stopped, signal.SIGCONT)  # it would be killed too, 30 s later
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert {line[:7] for line in said} == {"rank 0:", "rank 2:"}
    assert all("rank 1 of 3 did not answer: it has ended or hangs" in line for line in said), said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), 40)


def start_rank(rank: int, port: int, folder: Path, *flags: str, **env: str) -> ForkedProcess:
    """A rank of two, as a launcher of one's own starts it."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start_train(*DIGITS_JOB, "--store", str(folder), *flags, **{**variables, **env})


def check_line(output: str, said: str) -> None:
    own = [line for line in output.splitlines() if line.startswith("hapi-train:")]
    assert len(own) == 1 and said in own[0] and "Traceback" not in output, output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def test_two_jobs_on_one_port_and_a_host_that_is_not_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        output, _ = (second := start_rank(0, other.getsockname()[1], folder)).communicate(60)
    assert second.wait() == 2
    check_line(output, "another process listens there, maybe another job's; give each job a port of its own")
    lost = start_rank(0, free_port(), folder, MASTER_ADDR="x" * 64)
    output, _ = lost.communicate(60)
    assert lost.wait() == 2
    check_line(output, "there is no such host; give the address of the first rank's machine")


def test_ranks_with_different_arguments(folder: Path) -> None:
    port = free_port()
    ranks = [start_rank(rank, port, folder, "--bs", str(20 + rank)) for rank in range(2)]
    try:
        output, _ = ranks[0].communicate(60)
        assert ranks[0].wait() == 2
        check_line(output, "rank 1 has --bs 21 and the first one 20: give all ranks the same settings")
    finally:
        ranks[1].kill()


def test_a_full_disk_under_a_checkpoint_of_ranks(folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", 256) as full:
        flags = ("--store", str(folder), "--output", str(full / "run"), "--epochs", "2", "--patience", "1", "--threads", "1")
        done = subprocess.run(
            hapi_train(2, *DIGITS_JOB, *flags),
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("hapi-train: error")]
    assert len(own) == 1 and "No space left on device" in own[0], done.stderr
    assert str(Path("hapi", "train")) not in done.stderr, "no traceback of ours"
