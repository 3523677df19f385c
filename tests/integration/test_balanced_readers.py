"""Slow readers and clients that leave, seen by a server through nginx and HAProxy as ``deploy/`` configures them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.balancers import KINDS, Balancer, balanced, installed
from support.http_tools import (
    EXTRACT,
    Known,
    ServedApplication,
    exchange,
    make_store,
    request_bytes,
    served,
    until,
)
from support.waiting import PATIENCE

from hapi.models.graph.layers import Segment
from hapi.server.context import RequestContext
from hapi.server.http import response_stream

pytestmark = pytest.mark.slow
PIECE, PIECES = 128 << 10, 16
MOST_UNSEEN = 6 * PIECE
"""Bytes that a reader may take before the server sees it move."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def known(folder: Path) -> Known:
    return Known(folder)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return installed(str(request.param))


@contextmanager
def behind(
    kind: str, folder: Path, tmp_path: Path, **settings: Any
) -> Iterator[tuple[Balancer, ServedApplication]]:
    """A server of this process, twice behind a balancer."""
    with (
        served(folder, cos_batch=8, **settings) as server,
        balanced(kind, tmp_path, [server.port] * 2) as balancer,
    ):
        yield balancer, server


def asking(port: int, known: Known, samples: int) -> socket.socket:
    """A client that has asked for about 16 KiB of features a sample, and reads nothing yet."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=240)
    sock.sendall(request_bytes(EXTRACT, json.dumps(known.extract([n % 40 for n in range(samples)])).encode()))
    return sock


def dropped(server: ServedApplication) -> float:
    """Readers that the server dropped because they were slow."""
    text = exchange(server.port, "GET", "/metrics").body.decode()
    name = 'hapi_dropped_readers_total{reason="slow"} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def test_a_slow_reader_makes_room(kind: str, folder: Path, known: Known, tmp_path: Path) -> None:
    """It stays while nobody wants its slot; then it goes, and learns of it by a broken answer."""
    with behind(kind, folder, tmp_path, max_running=1, slow_reader_seconds=1.0) as (balancer, server):
        reader = asking(balancer.port, known, 4000)
        until(lambda: server.application.admission.running == 1, 20, "the reader's slot")
        assert not threading.Event().wait(3.0)
        assert server.application.admission.running == 1 and dropped(server) == 0
        answer = exchange(balancer.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])
        assert dropped(server) == 1
        received, end = 0, b""
        try:
            while part := reader.recv(1 << 16):
                received, end = received + len(part), (end + part)[-5:]
        except ConnectionError:
            end = b""
        assert received < 4000 * (16 << 10) and end != b"0\r\n\r\n"
        reader.close()


def test_a_server_sees_a_slow_reader_move(
    kind: str, folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balancer takes more from the server soon after the reader took some, not in steps of megabytes."""
    sockets: list[socket.socket] = []
    acknowledged = response_stream._acked

    def noting(sock: socket.socket) -> int | None:
        sockets.append(sock)
        return acknowledged(sock)

    monkeypatch.setattr(response_stream, "_acked", noting)
    with behind(kind, folder, tmp_path) as (balancer, _):
        reader = asking(balancer.port, known, 4000)
        until(lambda: len(sockets) > 3, 20, "full buffers")  # the server waits, and looks at the reader
        last, unseen, longest = acknowledged(sockets[0]) or 0, 0, 0
        for _ in range(PIECES):
            reader.recv(PIECE, socket.MSG_WAITALL)
            unseen += PIECE
            # It need not move for each piece, but must before there are too many.
            deadline = time.monotonic() + (1.0 if unseen < MOST_UNSEEN else PATIENCE)
            while (now := acknowledged(sockets[0]) or 0) == last and time.monotonic() < deadline:
                time.sleep(0.01)
            if now > last:
                last, unseen = now, 0
            longest = max(longest, unseen)
        reader.close()
    assert longest <= MOST_UNSEEN


def test_a_client_that_leaves_frees_the_device(
    kind: str, folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first byte of its answer."""
    begun, go_on = threading.Event(), threading.Event()
    forward = Segment.forward
    interests: list[Any] = []

    def gated(self: Segment, x: Any) -> Any:
        begun.set()
        go_on.wait(240)
        return forward(self, x)

    with behind(kind, folder, tmp_path, max_running=1) as (balancer, server):
        assert exchange(balancer.port, "POST", EXTRACT, known.extract()).status == 200
        monkeypatch.setattr(Segment, "forward", gated)
        stream = server.service.stream

        def noting(request: Any, context: RequestContext) -> Any:
            interests.append(context.interest)
            return stream(request, context)

        monkeypatch.setattr(server.service, "stream", noting)
        client = asking(balancer.port, known, 400)
        assert begun.wait(240)
        client.close()
        try:
            until(interests[0].is_set, 10, "the news")
        finally:
            go_on.set()
        server.idle()
