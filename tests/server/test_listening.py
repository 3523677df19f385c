"""The port of a server: taken by another one that starts, left a moment ago, and of IPv6."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from support.forked import ForkedProcess
from support.free_ports import free_port
from support.harness import (
    DIGITS_JOB,
    environment,
    losses,
    packed_digits,
    report_of,
    server,
    train,
)
from support.http_tools import exchange, until

from hapi.server.http import listening

TOKEN = "a-token-of-this-test-0123"
TIME_WAIT = "06"
"""State of a connection in Linux's table of them."""


def has_ipv6() -> bool:
    """Whether the loopback of this machine has an IPv6 address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_port_that_another_takes_after_it_was_bound() -> None:
    """Two sockets may be bound to one port as long as neither listens: the one that listens first has it."""
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", 0))
    runner: Any = MagicMock()

    def registered(_: object) -> None:
        other.listen()  # the site is made, and does not listen yet

    runner._reg_site.side_effect = registered
    with other, pytest.raises(OSError, match="Address already in use"):
        asyncio.run(listening.listen(runner, MagicMock(), "127.0.0.1", other.getsockname()[1]))


@pytest.mark.slow
def test_two_servers_at_once_on_one_port(tmp_path: Path) -> None:
    port = free_port()
    command = ["hapi.cli.server", "--store", str(tmp_path), "--port", str(port), "--log-level", "error"]
    both = [
        ForkedProcess(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "ab"
    ]
    try:
        until(lambda: any(one.poll() is not None for one in both), 180, "the end of one of them")
        loser, winner = sorted(both, key=lambda one: one.poll() is None)
        output, errors = loser.communicate(240)
        assert (loser.wait(240), output) == (2, "")
        assert errors == f"hapi-server: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        assert winner.stdout is not None
        assert winner.stdout.readline() == f"listening on http://127.0.0.1:{port}\n"
        assert exchange(port, "GET", "/healthz").status == 200
        winner.terminate()
        assert winner.wait(240) == 0
    finally:
        for one in both:
            one.kill()


@pytest.mark.slow
def test_a_server_starts_on_a_port_whose_connections_ended_just_now(tmp_path: Path) -> None:
    table = Path("/proc/net/tcp")
    with server(tmp_path) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        assert running.stop() == 0  # it ends the connection, so that its end of it waits for a minute
        connection.close()
        if table.exists():
            ours = f"0100007F:{running.port:04X}"
            rows = [line.split() for line in table.read_text().splitlines()]
            assert [row[3] for row in rows if row[1] == ours] == [TIME_WAIT]
        again = running.restarted()
        try:
            assert again.port == running.port
            assert exchange(again.port, "GET", "/healthz").status == 200
            assert again.stop() == 0
        finally:
            again.kill()


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="the loopback has no IPv6 address here")
def test_a_client_trains_over_ipv6(tmp_path: Path) -> None:
    store = packed_digits(tmp_path / "store", 128)
    job = (*DIGITS_JOB, "--bs", "32", "--epochs", "1")
    found = []
    for host, address in (("::", "[::1]"), ("127.0.0.1", "127.0.0.1")):
        with server(store, "--host", host, HAPI_TOKEN=TOKEN) as running:
            assert running.url == f"http://{f'[{host}]' if ':' in host else host}:{running.port}"
            report = tmp_path / f"{len(found)}.json"
            url = f"http://{address}:{running.port}"
            train(*job, "--server", url, "--report", str(report), HAPI_TOKEN=TOKEN)
            assert running.stop() == 0
        found.append(losses(report_of(report)))
    assert found[0] == found[1]
