"""A store that accepts and never answers: what it may take of a server, and that the server can be ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import environment
from harness import ServerProcess, server
from http_tools import EXTRACT, SAMPLES, Known, exchange, make_store, request_bytes, until
from hung_store import BUCKET, HungStore, hung_store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def known(folder: Path) -> Known:
    return Known(folder)


@pytest.fixture
def store(folder: Path) -> Iterator[HungStore]:
    with hung_store(folder) as running:
        yield running


def ask(port: int, path: str, document: object) -> socket.socket:
    """Begin a request and leave its connection open."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request_bytes(path, json.dumps(document).encode()))
    return sock


def hang(running: ServerProcess, store: HungStore, known: Known, count: int = 1) -> list[socket.socket]:
    """Requests for samples whose shards do not answer."""
    store.hang.add(".bin")
    before = len(store.asked)
    socks = [ask(running.port, SAMPLES, known.samples([n])) for n in range(count)]
    until(lambda: len(store.asked) > before, 20, "a read that hangs")
    return socks


def test_it_serves_as_a_folder_does(store: HungStore, known: Known) -> None:
    with server(f"s3://{BUCKET}", **store.environment) as running:
        known.check_features(exchange(running.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        names = exchange(running.port, "GET", "/v1/datasets").json()["datasets"]
        assert [d["name"] for d in names] == ["digits"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(store: HungStore, known: Known, number: signal.Signals) -> None:
    with server(f"s3://{BUCKET}", "--decode-processes", "1", **store.environment) as running:
        socks = hang(running, store, known, 3)
        children = _children(running.process.pid)
        assert children
        running.process.send_signal(number)
        until(lambda: exchange(running.port, "GET", "/readyz").status == 503, 5, "draining")
        assert running.process.poll() is None
        running.process.send_signal(number)
        assert running.process.wait(5) == 0
        until(lambda: not any(map(_alive, children)), 5, "the end of its children")
        for sock in socks:
            sock.close()


def test_a_drain_that_is_over_ends_it(store: HungStore, known: Known, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server(f"s3://{BUCKET}", "--drain-seconds", "0.5", log=log, **store.environment) as running:
        socks = hang(running, store, known)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(5.5) == 0
        assert json.loads(log.read_text().splitlines()[-1])["event"]
        for sock in socks:
            sock.close()


def test_the_end_of_its_parent_ends_it(store: HungStore, known: Known) -> None:
    command = [sys.executable, "-m", "hapi.cli.server", "--store", f"s3://{BUCKET}", "--port", "0",
               "--exit-with-stdin", "--threads", "1"]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment(**store.environment),
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        store.hang.add(".bin")
        sock = ask(port, SAMPLES, known.samples([0]))
        until(lambda: bool(store.asked), 20, "a read that hangs")
        process.stdin.close()
        assert process.wait(5) == 0
        sock.close()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
