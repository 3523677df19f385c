"""Loops of Lightning, Accelerate and Hugging Face's Trainer take the steps that they take in memory, bit by bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from support.forked import ForkedProcess
from support.hub_outputs import ROOT, hub_package

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("library", ["accelerate", "lightning", "trainer"])
def test_the_steps_are_those_in_memory(library: str, tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "tests")]
    if library == "trainer":
        paths.append(str(hub_package().parent))
    elif importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    process = ForkedProcess(
        ["support.library_loops", library, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
    assert process.wait() == 0, output[-2000:] + errors[-4000:]
    assert output.splitlines()[-1] == "equal: kept, swapped, recomputed"
