"""A real OpenStack Swift for the tests, run by the project's own script, and a proxy that makes a store unreliable."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.harness import DIGITS_JOB, ROOT, ServerProcess, losses, report_of, train, wait_for
from support.waiting import PATIENCE

SCRIPT = ROOT / "scripts" / "swift-loopback"
REQUIRED = "HAPI_REQUIRE_SWIFT"
"""Set where a missing Swift is a failure, not a reason to skip tests."""

SAMPLES, EPOCHS, SPLIT = 60, 4, "maxpool"
PACKED = ("--image-size", "32", "--limit", str(SAMPLES), "--shard-size", "1KiB", "--quiet")
"""Many small shards, so that one epoch asks the store for many objects."""
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--epochs", str(EPOCHS), "--dataset", "digits",
)  # fmt: skip
SERVER = ("--cos-batch", "5", "--chunk-cache", "0")
"""Without a cache every epoch asks the store for every sample again."""
ONE = "s3://hapi/one"
"""Where the fixture ``packed`` has the digits."""


class Swift:
    """One Swift in a folder of its own. Killed processes run again after :meth:`start`."""

    def __init__(self, folder: Path, nodes: int, replicas: int) -> None:
        self.folder = folder
        self._settings = {"SWIFT_NODES": str(nodes), "SWIFT_REPLICAS": str(replicas)}
        self.start()
        lines = self._script("env").stdout
        self.environment: dict[str, str] = dict(re.findall(r"(AWS_\w+)=(\S+)", lines))

    def start(self) -> None:
        """Start what does not run, and wait until the whole answers."""
        self._script("start")

    def stop(self) -> None:
        """End every process."""
        self._script("stop")

    @property
    def port(self) -> int:
        """The proxy's port."""
        return int(self.environment["AWS_ENDPOINT_URL"].rsplit(":", 1)[1])

    def processes(self) -> dict[str, int | None]:
        """Process id by name; None for what does not run."""
        lines = self._script("status", check=False).stdout.splitlines()
        words = [line.split() for line in lines]
        return {w[0]: int(w[2]) if w[1] == "up" else None for w in words}

    def kill(self, *names: str) -> None:
        """SIGKILL for these processes, or for all."""
        chosen = {n: pid for n, pid in self.processes().items() if not names or n in names}
        assert chosen and None not in chosen.values(), chosen
        for pid in chosen.values():
            os.kill(pid or 0, signal.SIGKILL)
        wait_for(lambda: not any(self.processes()[n] for n in chosen), 60, "the end of killed processes")

    def _script(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(SCRIPT), command, str(self.folder)], capture_output=True, text=True,
            env={**os.environ, **self._settings}, timeout=240, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"swift-loopback {command} ended with {done.returncode}: {done.stderr}")
        return done


@contextlib.contextmanager
def running_swift(folder: Path, nodes: int, replicas: int) -> Iterator[Swift]:
    """A Swift that is ended whatever happens; the test is skipped (or fails, see ``REQUIRED``) without one."""
    done = subprocess.run([str(SCRIPT), "install"], capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        reason = f"Swift cannot be installed: {' '.join(done.stderr.split())[-300:]}"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{reason} ({REQUIRED} is set)")
        pytest.skip(reason)
    try:
        yield Swift(folder, nodes, replicas)
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder)], capture_output=True, timeout=240, check=False)


class FaultProxy:
    """An HTTP proxy in front of a store that answers reads of shards and packs with the next of ``faults`` in turn.

    "pass"; "late": after a quarter of a second; "500", "503": an error; "403": no permission; "reset" and "cut": half
    of the body, then a reset or an orderly end; "less": a sound answer with fewer bytes than were asked for.

    It holds answers too, of reads beyond ``read_bytes`` and of writes beyond ``writes`` (which are done then), until
    :meth:`release`: a process that waits for one can be stopped or killed in the middle of its work.
    """

    def __init__(self, port: int) -> None:
        self.faults: tuple[str, ...] = ("pass",)
        self.happened: Counter[str] = Counter()
        self.read_bytes, self.writes = math.inf, math.inf
        self._lock, self._count, self._released = threading.Lock(), 0, threading.Event()
        proxy = self

        class Handler(_Handler):
            def do(self) -> None:
                data = "shard-" in self.path or "/packs/" in self.path
                held = data and proxy._is_held(self.command, self.headers.get("Range"))
                fault = proxy._next() if self.command == "GET" and data else "pass"
                self.relay(port, fault, proxy._released if held else None)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def _next(self) -> str:
        with self._lock:
            fault = self.faults[self._count % len(self.faults)]
            self._count += 1
            self.happened[fault] += 1
        return fault

    def _is_held(self, command: str, span: str | None) -> bool:
        with self._lock:
            if command == "PUT":
                self.writes -= 1
                return self.writes < 0
            held = command == "GET" and self.read_bytes <= 0
            first, _, last = (span or "").removeprefix("bytes=").partition("-")
            self.read_bytes -= int(last) + 1 - int(first) if last else 0
            return held

    def release(self) -> None:
        """Let answers pass, those that are held and all later ones."""
        self._released.set()

    def close(self) -> None:
        """End the listener and its thread."""
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def relay(self, port: int, fault: str, released: threading.Event | None = None) -> None:
        """Ask the store and hand its answer on, with ``fault``, when ``released`` is set; signed headers stay."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "late":
            time.sleep(0.25)
        if fault.isdecimal():
            code = "AccessDenied" if fault == "403" else "InternalError"
            self._answer(int(fault), {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            headers, data = dict(response.getheaders()), response.read()
        finally:
            upstream.close()
        if released is not None:
            released.wait(2 * PATIENCE)
        if fault == "less" and response.status == 206:
            data = data[: len(data) // 2]
            first, total = re.findall(r"\d+", headers["Content-Range"])[::2]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total}"
            headers["Content-Length"] = str(len(data))
        self._answer(response.status, headers, data, fault)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, fault: str = "pass") -> None:
        headers.setdefault("Content-Length", str(len(data)))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        if fault in ("reset", "cut"):
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())  # at once: the base class would end it in order first
        elif self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests count what happened."""


def trained(running: ServerProcess, split: str, path: Path) -> list[float]:
    """The losses of a whole run."""
    train(*JOB, "--split", split, "--server", running.url, "--report", str(path))
    return losses(report_of(path))
