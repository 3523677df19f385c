"""Ranks that read something else than the first one: refused in one line, before the first step."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import ForkedProcess
from support.free_ports import free_port
from support.harness import server
from support.joint_training import environment, hapi_train
from support.local_job import pack_blobs

from hapi.cli.shared.ranks import going_on
from hapi.client.joint.ranks import Ranks
from hapi.errors import UsageError
from hapi.train.distributed.agreement import check_same
from hapi.train.settings import TrainSettings

COUNT = 60
MODEL = "support.joint_training:network"


class Two(Ranks):
    """The first of two ranks, whose other one has other facts."""

    size = 2

    def __init__(self, **other: Any) -> None:
        self.other = other

    def gathered(self, value: Any) -> list[Any]:
        return [value, value | {name: v for name, v in self.other.items() if name in value}]


def test_facts_that_differ_are_named() -> None:
    check_same(Two(), {"a": 1, "b": [2]}, "do")
    with pytest.raises(UsageError, match=r"rank 1 has b 3 and the first one \[2\]: do something"):
        check_same(Two(b=3), {"a": 1, "b": [2]}, "do something")


@pytest.mark.parametrize("library", ["hapi", "torch"])
def test_versions_that_differ_are_refused(library: str) -> None:
    with pytest.raises(UsageError, match=f"rank 1 has {library} 0.0 .*: install the same versions for all"):
        going_on(TrainSettings(), Two(**{library: "0.0"}))
    local = Two(torch=torch.__version__.partition("+")[0])
    assert going_on(TrainSettings(), local) == TrainSettings(), "builds for a GPU and for none may meet"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Servers over two stores with a dataset of one name."""
    with ExitStack() as ends:
        found = []
        for count in (COUNT, COUNT + 1):
            store = tmp_path_factory.mktemp("agreeing") / "store"
            pack_blobs(store, count=count)
            found.append(ends.enter_context(server(store, "--allow-model", MODEL)).url)
        yield found


def flags(url: str, *more: str) -> list[str]:
    return [
        "--server", url, "--dataset", "blobs", "--model", MODEL, "--weights", "random", "--freeze", "2", "--split", "2",
        "--bs", "12", "--lr", "0.01", "--threads", "1", "--no-progress", *more,
    ]  # fmt: skip


def refused(ranks: Sequence[tuple[Path, list[str]]], code: int = 2) -> str:
    """The line of the first one of ranks in these folders, with these flags."""
    port = free_port()
    processes = [
        ForkedProcess(
            ["hapi.cli.train", *own], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(len(ranks)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            ),
        )
        for rank, (folder, own) in enumerate(ranks)
    ]  # fmt: skip
    try:
        output, _ = processes[0].communicate(240)
        assert processes[0].wait() == code, output
    finally:
        for process in processes:
            process.kill()
    (line,) = (line for line in output.splitlines() if line.startswith("hapi-train:"))
    return line


@pytest.mark.slow
def test_ranks_whose_servers_have_other_samples(urls: list[str], tmp_path: Path) -> None:
    line = refused([(tmp_path, flags(url, "--no-output", "--cache", "off")) for url in urls])
    assert "rank 1 has dataset " in line and "let all ranks use the same servers" in line


@pytest.mark.slow
def test_ranks_that_do_not_see_one_checkpoint(urls: list[str], tmp_path: Path) -> None:
    """As on machines that share no disk: the first one would go on, and the others begin anew."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    keeping = flags(urls[0], "--no-output", "--cache", "off", "--checkpoint", "kept.pt")
    done = hapi_train(0, *keeping, "--epochs", "1", folder=folders[0])
    assert done.returncode == 0, done.stderr
    resumed = [*keeping, "--resume", "--epochs", "2"]
    line = refused([(folder, resumed) for folder in folders])
    assert "rank 1 has a checkpoint of nothing and the first one epoch 1, batch 0 after losses of " in line
    assert "kept.pt has to be one file that all ranks see" in line


@pytest.mark.slow
def test_what_one_rank_alone_meets_is_said_by_the_first(urls: list[str], tmp_path: Path) -> None:
    """The launcher ends all ranks when the first one ends: nobody else would hear of it."""
    (tmp_path / "file").touch()
    job = flags(urls[0], "--no-output", "--cache", "on", "--cache-dir")
    line = refused([(tmp_path, [*job, str(tmp_path / name)]) for name in ("folder", "file")], code=1)
    assert f"rank 1 of 2 failed: --cache-dir {tmp_path / 'file'}" in line
