"""The id of the processors that a process runs on: equal where they are the same, and no name of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hapi.process import machine_id as module
from hapi.process.machine_id import machine_id

OTHER = "from hapi.process.machine_id import machine_id; print(machine_id())"


def test_processes_on_the_same_processors_have_the_same_id() -> None:
    other = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id() == machine_id()
    assert len(machine_id()) == 32 and int(machine_id(), 16)
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "") not in machine_id()


def test_a_process_that_is_pinned_has_another() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one processor only")
    code = f"import os; os.sched_setaffinity(0, {{{usable[0]}}}); {OTHER}"
    pinned = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert pinned.stdout.strip() not in ("", machine_id())


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "none")
    assert machine_id() == ""
