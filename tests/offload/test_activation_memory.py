"""Predicted memory of a pass beside the process's own highest use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's highest use of memory")
def test_highest_use_of_a_process_is_just_below_the_prediction(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    memory = 150_000_000
    command = [sys.executable, "-m", "support.activation_memory", str(memory), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["swapped_bytes"] > memory and report["predicted_peak_bytes"] <= memory
    assert report["growth"] <= report["predicted_peak_bytes"] <= 1.25 * report["growth"]
