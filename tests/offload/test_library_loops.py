"""Loops of Lightning, Accelerate and Hugging Face's Trainer take the steps that they take in memory, bit by bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    command = [sys.executable, "-m", "support.library_loops", library, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "equal: kept, swapped, recomputed"
