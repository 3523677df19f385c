"""A process whose parent is killed: it is told, gets SIGTERM, and SIGKILL where that does not end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.harness import wait_for

pytestmark = pytest.mark.slow

RANK = """
import os, signal, sys, time
from hapi.train.distributed import launcher_watch
launcher_watch.WATCH_SECONDS, launcher_watch.END_SECONDS = 0.2, 3.0
def gone():
    print("gone", flush=True)
    {gone}
launcher_watch.stop_with_launcher(gone)
signal.signal(signal.SIGTERM, lambda number, frame: print("SIGTERM", flush=True) or {after})
print(os.getpid(), flush=True)
while True:
    time.sleep(1)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize(
    ("gone", "after"), [("pass", "os._exit(0)"), ("pass", "None"), ("raise BrokenPipeError", "os._exit(0)")]
)
def test_it_ends_when_its_parent_is_killed(gone: str, after: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK.format(gone=gone, after=after)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    rank = Path("/proc") / launcher.stdout.readline().strip()
    assert rank.exists()
    launcher.kill()
    said, _ = launcher.communicate(timeout=240)  # the rank has its stdout, too
    assert said.splitlines() == ["gone", "SIGTERM"]

    def is_gone() -> bool:
        with suppress(FileNotFoundError):
            return "State:\tZ" in (rank / "status").read_text()
        return True

    wait_for(is_gone, 10)
    assert launcher.returncode == -signal.SIGKILL
