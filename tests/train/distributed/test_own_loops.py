"""Loops of users by several processes: the examples for torchrun, Accelerate's launcher and Lightning's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_python import PYTHON
from support.harness import ServerProcess
from support.joint_training import ROOT, TORCHRUN, ForkedRanks, environment
from support.local_job import COUNT, pack_blobs

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "several_processes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("joint")
    pack_blobs(folder / "store")
    process = ServerProcess(folder / "store")
    yield process.url
    process.stop()


def commands(server: str) -> dict[str, list[str]]:
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    return {
        "torch": [*TORCHRUN, "--nproc-per-node", "2", str(EXAMPLES / "torchrun_loop.py"), server],
        "accelerate": [
            *launch, "--cpu", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
            str(EXAMPLES / "accelerate_loop.py"), server,
        ],
        "lightning": [sys.executable, str(EXAMPLES / "lightning_loop.py"), server, "2"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=pytest.mark.long) for name in ("torch", "accelerate", "lightning")]
)
def test_each_sample_is_trained_on_once(library: str, server: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        commands(server)[library], env=environment(HF_HOME=str(tmp_path)), cwd=tmp_path,
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_epochs(done.stdout)


def test_the_loop_for_torchrun_by_ranks_of_the_tests(server: str, tmp_path: Path) -> None:
    ranks = ForkedRanks(2, [PYTHON, str(EXAMPLES / "torchrun_loop.py"), server], tmp_path)
    output, errors = ranks.communicate(240)
    assert ranks.returncode == 0, output + errors
    check_epochs(output)


def check_epochs(output: str) -> None:
    found = re.findall(r"^epoch (\d): loss \d+\.\d+ over (\d+) samples", output, re.MULTILINE)
    assert found == [("0", str(COUNT)), ("1", str(COUNT))], output
