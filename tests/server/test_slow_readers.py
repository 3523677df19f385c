"""Readers that take too little lose their slots, and the device stops working for clients that are gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import (
    EXTRACT,
    Known,
    ServedApplication,
    exchange,
    metric,
    served,
    until,
)
from test_http_clients import long_request, reset

from hapi.models.graph.layers import Segment
from hapi.server.context import RequestContext
from hapi.wire.messages import ExtractRequest

RUNNING = 2


@contextmanager
def trickling(server: ServedApplication, known: Known, count: int) -> Iterator[list[socket.socket]]:
    """Clients with small buffers that take one byte of a long answer now and then, until they cannot."""
    readers, over = [], threading.Event()
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(0.05)
        sock.sendall(long_request(known))
        readers.append(sock)

    def trickle() -> None:
        left = list(readers)
        while left and not over.wait(0.05):
            for sock in list(left):
                try:
                    sock.recv(1)
                except TimeoutError:
                    continue
                except OSError:
                    left.remove(sock)

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield readers
    finally:
        over.set()
        thread.join()
        for sock in readers:
            sock.close()


def dropped(server: ServedApplication, reason: str) -> float:
    """How many readers the server has dropped for this reason."""
    text = exchange(server.port, "GET", "/metrics").body.decode()
    name = f'hapi_dropped_readers_total{{reason="{reason}"}} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def kernel_keeps(port: int) -> int:
    """Bytes in the kernel that wait to be sent by any connection of this port, whoever owns it."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] != "0A":  # 0A listens
            total += int(fields[4].partition(":")[0], 16)
    return total


@pytest.mark.slow
def test_slow_readers_make_room(folder: Path, known: Known, caplog: pytest.LogCaptureFixture) -> None:
    """They hold every slot as long as nobody else wants one; then they go, and nothing is kept for them."""
    caplog.set_level("INFO", "hapi.server")
    with (
        served(folder, cos_batch=8, max_running=RUNNING, slow_reader_seconds=1.0) as server,
        trickling(server, known, RUNNING),
    ):
        until(lambda: server.application.admission.running == RUNNING, 20, "slow readers in every slot")
        until(lambda: kernel_keeps(server.port) > 100_000, 20, "full buffers")
        assert not threading.Event().wait(1.5)
        assert server.application.admission.running == RUNNING  # nobody wants their slots
        assert dropped(server, "slow") == 0
        answer = exchange(server.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])
        assert 1 <= dropped(server, "slow") <= RUNNING
        others = [threading.Thread(target=exchange, args=(server.port, "POST", EXTRACT, known.extract()))
                  for _ in range(8)]  # fmt: skip
        for other in others:
            other.start()
        for other in others:
            other.join()
        until(
            lambda: server.application.admission.running == RUNNING - dropped(server, "slow"),
            10,
            "only who was not in the way",
        )
        if dropped(server, "slow") == RUNNING:
            until(lambda: kernel_keeps(server.port) == 0, 10, "empty buffers of the kernel")
    lines = [r for r in caplog.records if getattr(r, "dropped", None)]
    assert lines and all(r.status == 499 and "while others wait" in r.dropped for r in lines)


@pytest.mark.slow
def test_slow_readers_give_memory_back(folder: Path, known: Known) -> None:
    """Slots are free, but one of them holds what the device has."""
    request = ExtractRequest.from_json(known.extract())
    with served(folder, cos_batch=8) as server:
        assert exchange(server.port, "POST", EXTRACT, known.extract()).status == 200
        worker = server.service.workers.all[0]
        batch = server.service.workers.sizing.of(request).forward.of(8)
        budget = worker.cache.resident_bytes + int(1.5 * batch)
    with (
        served(folder, cos_batch=8, max_running=4, slow_reader_seconds=1.0, device_memory=budget) as server,
        trickling(server, known, 1),
    ):
        until(lambda: kernel_keeps(server.port) > 100_000, 20, "full buffers")
        assert not threading.Event().wait(1.5)
        assert dropped(server, "slow") == 0
        ids = list(range(8))
        answer = exchange(server.port, "POST", EXTRACT, known.extract(ids))
        known.check_features(answer.body, ids)
        until(lambda: dropped(server, "slow") == 1, 10, "the count of the drop")


@pytest.mark.slow
def test_nothing_is_kept_for_a_silent_reader(folder: Path, known: Known) -> None:
    """Neither by the server nor by the kernel, which would try to deliver for minutes."""
    with served(folder, cos_batch=8, max_running=1, send_timeout=0.5) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(long_request(known))
        until(lambda: dropped(server, "silent") == 1, 20, "the drop")
        server.idle()
        until(lambda: kernel_keeps(server.port) == 0, 5, "empty buffers of the kernel")
        assert metric(server.port, "hapi_cancelled_total") == 1
        sock.close()


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
def test_a_client_that_leaves_frees_the_device(
    folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch, leave: Any
) -> None:
    """After the COS batch that is under way, no other is computed for it."""
    begun: list[int] = []
    under_way, go_on = threading.Event(), threading.Event()
    forward = Segment.forward

    def gated(self: Segment, x: Any) -> Any:
        begun.append(x.shape[0])
        if len(begun) == 3:
            under_way.set()
            go_on.wait(240)
        return forward(self, x)

    with served(folder, cos_batch=2, max_running=1) as server:
        assert exchange(server.port, "POST", EXTRACT, known.extract([1, 2])).status == 200
        monkeypatch.setattr(Segment, "forward", gated)
        begun.clear()
        cancelled: list[threading.Event] = []
        stream = server.service.stream

        def noting(request: Any, context: RequestContext) -> Any:
            cancelled.append(context.interest)
            return stream(request, context)

        monkeypatch.setattr(server.service, "stream", noting)
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(long_request(known, 400))
        assert under_way.wait(240)
        leave(sock)
        until(cancelled[0].is_set, 10, "the news")
        go_on.set()
        server.idle()
        assert begun == [2, 2, 2]
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
