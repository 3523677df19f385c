"""The embedded server: it says why it cannot start, wants its token, and never outlives its trainer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.forked import OWN_SERVERS, ForkedProcess
from support.forked_python import PYTHON
from support.harness import environment, wait_for

from hapi.client.transport import embedded_server as embedded
from hapi.client.transport.embedded_server import EmbeddedServer
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import HapiError, TransportError, UnauthorizedError, UsageError
from hapi.process import child_server
from hapi.wire.transport.http import HttpTransport


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize(
    ("store", "match"), [("memory://", "lives in one process"), ("ftp://x", "unknown scheme 'ftp'")]
)
def test_a_store_that_cannot_be_starts_nothing(store: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        EmbeddedServer(store)


def test_no_room_for_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded.tempfile, "TemporaryFile", full)
    with pytest.raises(UsageError, match="log: No space left on device; free some, or set TMPDIR"):
        EmbeddedServer(str(tmp_path))


@pytest.mark.slow
def test_it_serves_who_knows_the_token_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_SERVER_HOST", "0.0.0.0")  # of another server of this machine
    monkeypatch.setenv("HAPI_SERVER_TENANTS", "/nowhere")
    server = EmbeddedServer(str(tmp_path))
    try:
        with pytest.raises(UnauthorizedError):
            HttpTransport(server.url).call("GET", "/v1/datasets")
        assert HttpTransport(server.url, token=server.token).call("GET", "/v1/datasets") == {"datasets": []}
        command = Path(f"/proc/{server.pid}/cmdline")
        if command.exists():
            assert server.token.encode() not in command.read_bytes()
    finally:
        server.close()
        server.close()
    assert not is_alive(server.pid)


def test_its_end_in_the_middle_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its words come before it listens: it is killed as soon as it does.
    listening = "echo out of luck >&2; echo listening on http://127.0.0.1:9; exec sleep 600"
    monkeypatch.setattr(sys, "executable", program(tmp_path, listening))
    server = EmbeddedServer(str(tmp_path))
    try:
        server.check()
        os.kill(server.pid, signal.SIGKILL)
        pool = ServerPool([HttpTransport(server.url)], retry_timeout=600, check=server.check)
        started = time.monotonic()
        with pytest.raises(HapiError, match=r"was killed by SIGKILL; .*memory.*last words: out of luck"):
            pool.get("/v1/datasets", list)
        assert time.monotonic() - started < 300
    finally:
        server.close()


@pytest.mark.slow
def test_it_says_why_it_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"did not start: hapi-server: error: .*nothing") as caught:
        EmbeddedServer(str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def program(tmp_path: Path, text: str) -> str:
    """An interpreter that runs ``text`` instead of hapi-server."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_does_not_log_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it logs goes into a file that grows as long as training goes on."""
    monkeypatch.setattr(sys, "executable", program(tmp_path, 'echo "$@" >&2; exit 1'))
    with pytest.raises(TransportError, match="--log-level warning"):
        EmbeddedServer(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("exit 3", "did not start: it said nothing"),
        ("echo hello; sleep 0.1", "did not start: it said nothing"),
        ("printf 'one\\ntwo \\033[31m\\377\\n' >&2; exit 1", "did not start: two"),
        ("head -c 3000000 /dev/zero | tr '\\0' 'x' >&2; exit 1", "did not start: x"),
    ],
    ids=["silent", "other words", "odd bytes", "much"],
)
def test_other_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, match: str) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, text))
    with pytest.raises(TransportError, match=match) as caught:
        EmbeddedServer(str(tmp_path))
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


def test_one_that_never_listens_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_server, "START_SECONDS", 0.5)
    monkeypatch.setattr(child_server, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(sys, "executable", program(tmp_path, "exec sleep 600"))
    pids: list[int] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"did not start within 0\.5 s: it said nothing"):
        EmbeddedServer(str(tmp_path))
    assert time.monotonic() - started < 300
    assert len(pids) == 1 and not is_alive(pids[0])


@pytest.mark.slow
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from hapi.client.transport.embedded_server import EmbeddedServer\n"
        "print(EmbeddedServer(sys.argv[1]).pid, flush=True); time.sleep(600)"
    )
    parent = ForkedProcess(
        [PYTHON, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment(**{OWN_SERVERS: "1"})
    )
    with parent.stdout as said:  # type: ignore[union-attr]
        pid = int(said.readline())
    assert is_alive(pid)
    parent.kill()
    wait_for(lambda: not is_alive(pid), 60, "the end of the embedded server")
