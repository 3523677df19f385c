"""The Swift of a benchmark ends with the benchmark, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.storage.samples_served import LoopbackSwift
from benchmarks.testbed.loose import LooseBed
from hapi.errors import UsageError

pytestmark = pytest.mark.slow

HOLDER = """
import sys, time
from pathlib import Path
from benchmarks.testbed.loose import LooseBed
from benchmarks.storage.samples_served import LoopbackSwift
with LooseBed("a test") as bed, LoopbackSwift(bed, Path(sys.argv[1])) as swift:
    print(*swift.pids(), flush=True)
    while True:  # a signal that comes just before a sleep is seen after it
        time.sleep(0.1)
"""


def running(pids: list[int]) -> list[int]:
    """Those that run still; what is left of one that nobody has waited for does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] if state != "Z" else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_daemon_is_left(tmp_path: Path, number: signal.Signals) -> None:
    try:
        LoopbackSwift(LooseBed("a test"), tmp_path)
    except UsageError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "swift")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        assert len(running(pids)) == 4
        holder.send_signal(number)
        deadline = time.monotonic() + 240
        while running(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(pids)
        assert holder.wait(240) == (-number if number == signal.SIGKILL else 128 + number)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
