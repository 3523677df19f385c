"""Processes of the two tiers, for benchmarks: started from this checkout, told a token, read line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hapi.bench.testbed import ADDRESS, TestBed
from hapi.errors import TransportError

START_SECONDS = 120.0
"""Longest time until a process of Hapi's is ready on a slow machine."""


def start_server(bed: TestBed, store: Path, token: str, folder: Path, flags: Sequence[str] = ()) -> str:
    """Start ``hapi-server`` on its side of the bed; returns its URL once it listens."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "hapi.cli.server", "--store", str(store), "--host", ADDRESS["server"]]
    command += [
        "--port",
        "0",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--exit-with-stdin",
        "--log-level",
        "warning",
    ]
    with log.open("wb") as stderr:
        process = bed.start(
            "server",
            [*command, *flags],
            env=environment(token),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    line = read_line(process, START_SECONDS)
    prefix = "listening on "
    if not line.startswith(prefix):
        raise TransportError(f"hapi-server did not start on the test bed: {last_line(log.read_text())}")
    return line.removeprefix(prefix).strip()


def environment(token: str) -> dict[str, str]:
    # The paths of this process, so that a checkout that is not installed is found too.
    paths = os.pathsep.join(dict.fromkeys(str(Path(p).absolute()) for p in sys.path))
    return {**os.environ, "HAPI_TOKEN": token, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """The first line of a process's output; empty when it ended or took longer than ``seconds``."""
    lines: list[str] = []
    stdout = process.stdout
    if stdout is None:
        return ""
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(seconds)
    return lines[0] if lines else ""


def last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
