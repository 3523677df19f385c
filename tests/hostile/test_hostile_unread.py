"""A server whose log nobody reads any more serves on, and says afterwards how many lines are missing; one that fails to
start ends when it is told to."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.harness import environment, server
from support.http_tools import EXTRACT, Known, exchange, metric, until

DROPPED = "hapi_log_lines_dropped_total"
REQUESTS = 20_000
"""Their lines are four times as much as waits for a reader."""


def drop_lines(port: int) -> None:
    """Ask until lines of the log are dropped."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    for number in range(REQUESTS):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        if number % 500 == 499 and metric(port, DROPPED):
            break
    connection.close()
    assert metric(port, DROPPED) > 0


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_nothing(folder: Path, known: Known, tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    reading = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
    with server(folder, "--log-level", "debug", log=log) as running:
        drop_lines(running.port)
        answer = exchange(running.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, known.extract()["ids"])
        dropped = metric(running.port, DROPPED)
        lines: list[str] = []
        os.set_blocking(reading, True)
        reader, stop = os.fdopen(reading), threading.Event()

        def read() -> None:
            """Read until the line about the dropped ones has come."""
            while not stop.is_set():
                lines.append(reader.readline())
                if "lines dropped" in lines[-1]:
                    stop.set()

        thread = threading.Thread(target=read)
        thread.start()
        until(stop.is_set, 60, "a line about those dropped")
        thread.join()
        told = json.loads(lines[-1])
        assert told["level"] == "warning" and told["dropped"] >= dropped
        assert all(json.loads(line)["event"] for line in lines)
        for _ in range(100):  # the pipe is full once more
            exchange(running.port, "GET", "/healthz")
        assert running.stop() == 0, "nor does it hold up the end"
        reader.close()


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the handlers of a process are told by Linux only"
)
def test_a_server_that_fails_to_start_can_be_ended_while_nobody_reads_why(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"\n" * fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "hapi.cli.server", "--store", str(tmp_path), "--port", port]
        process = subprocess.Popen(command, stderr=writing, env=environment())
        try:
            until(lambda: catches(process.pid, signal.SIGHUP), 180, "the command's beginning")
            # It has a handler until its event loop is closed, with the failure as the outcome.
            until(lambda: not catches(process.pid, signal.SIGHUP), 180, "the failure")
            process.terminate()
            assert process.wait(240) == -signal.SIGTERM
        finally:
            process.kill()
            process.wait()
            os.close(writing)
            os.close(reading)
