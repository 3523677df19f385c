"""Trouble of every kind for a served application, and what must hold when it is over.

The server is the real application in this process, so that its store and its device can be made to fail; the trainers
are processes. Trouble goes on in threads until it is told to stop.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hapi.errors import StoreError
from hapi.models.graph.layers import Segment
from hapi.store.local import LocalStore
from support.hostile_tools import resident_bytes
from support.http_tools import EXTRACT, SAMPLES, Known, ServedApplication, exchange, request_bytes, until

MIB = 1 << 20
Trouble = Callable[[ServedApplication, Known, threading.Event], None]


def leave(sock: socket.socket, how: random.Random) -> None:
    """With a reset, or in order."""
    if how.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def vanishing(server: ServedApplication, known: Known, over: threading.Event) -> None:
    """Clients that leave at any moment of a request: before its end, while it waits, in the middle of the answer."""
    how = random.Random(1)
    documents = ((EXTRACT, known.extract([n % 40 for n in range(400)])), (SAMPLES, known.samples([1] * 4000)))
    while not over.wait(0.02):
        path, document = how.choice(documents)
        data = request_bytes(path, json.dumps(document).encode())
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            sock.sendall(data[: how.choice((1, 30, len(data) // 2, len(data), len(data), len(data)))])
            if how.random() < 0.5:
                sock.settimeout(how.random() / 4)
                sock.recv(1 + how.randrange(100_000))
            leave(sock, how)


def trickling(server: ServedApplication, known: Known, over: threading.Event) -> None:
    """Four at a time that take one byte a second."""
    body = request_bytes(EXTRACT, json.dumps(known.extract([n % 40 for n in range(4000)])).encode())
    readers: list[socket.socket] = []
    while not over.wait(1.0 if len(readers) == 4 else 0.01):
        while len(readers) < 4:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(body)
            sock.settimeout(0.02)
            readers.append(sock)
        for sock in list(readers):
            try:
                if not sock.recv(1):
                    raise ConnectionError
            except TimeoutError:
                continue
            except OSError:
                readers.remove(sock)
                sock.close()
    for sock in readers:
        sock.close()


def garbage(server: ServedApplication, known: Known, over: threading.Event) -> None:
    """What is no HTTP, half of it, too much of it, wrong lengths, or comes too slowly."""
    how = random.Random(2)
    good = json.dumps(known.extract()).encode()
    kinds: list[Callable[[], bytes]] = [
        lambda: how.randbytes(how.randrange(1, 4000)),
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + good,
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n" + good,
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n" + good,
        lambda: (
            b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n"
            + good
        ),
        lambda: request_bytes(EXTRACT, good[: how.randrange(len(good))]),
        lambda: request_bytes(EXTRACT, bytes(b ^ (how.random() < 0.01) for b in good)),
        lambda: b"GET /v1/datasets/" + b"%2e%2e/" * 50 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    while not over.wait(0.01):
        for sock in slow:  # headers that come a byte at a time
            with contextlib.suppress(OSError):
                sock.send(how.choice((b"G", b"a", b":", b" ", b"\n")))
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=0.2)
            sock.sendall(how.choice(kinds)())
            sock.recv(1000)
            leave(sock, how)
    for sock in slow:
        sock.close()


def crowding(server: ServedApplication, known: Known, over: threading.Event) -> None:
    """More at a time than may wait; those that are sent away come again soon, whatever they are told."""

    def call(number: int) -> None:
        how = random.Random(number)
        while not over.wait(how.random() / 2):
            ids = [how.randrange(40) for _ in range(16)]
            # A store that fails in the middle of an answer says so in an error frame; wrong features say nothing.
            with contextlib.suppress(OSError, StoreError):
                answer = exchange(server.port, "POST", EXTRACT, known.extract(ids), seconds=20)
                if answer.status == 200:
                    known.check_features(answer.body, ids)

    with ThreadPoolExecutor(12) as crowd:
        for _ in crowd.map(call, range(12)):
            pass


@contextlib.contextmanager
def failing_store(share: float, longest_stall: float) -> Iterator[list[str]]:
    """Some reads of any store in this process fail, others stall; the list grows with each."""
    how, lock, happened = random.Random(3), threading.Lock(), list[str]()
    read_many = LocalStore.read_many

    def unreliable(self: LocalStore, *parts: Any) -> None:
        with lock:
            fails, stalls, seconds = how.random() < share, how.random() < share, how.random() * longest_stall
        if stalls:
            happened.append("stall")
            time.sleep(seconds)
        if fails:
            happened.append("error")
            raise StoreError(f"{self.url}: injected by a test; try again")
        read_many(self, *parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read_many", unreliable)
        yield happened


@contextlib.contextmanager
def scarce_memory(share: float) -> Iterator[list[str]]:
    """Some forward passes of several samples run out of memory; the list grows with each."""
    how, happened = random.Random(4), list[str]()
    forward = Segment.forward

    def unlucky(self: Segment, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and how.random() < share:
            happened.append("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Injected by a test.")
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "forward", unlucky)
        yield happened


class Settled:
    """What a server that nobody asks has, and must have again when all trouble is over."""

    def __init__(self, server: ServedApplication) -> None:
        self._server = server
        self._idle()
        self.threads, self.descriptors, self.tasks = self._counts()
        self.resident = resident_bytes(_own())

    def check(self, known: Known, *, memory: int = 150 * MIB) -> None:
        """Nothing is left of the trouble, the metrics add up, and good requests are answered right."""
        self._idle()
        application = self._server.application
        until(self._connections_are_over, 60, "the end of all connections and of their tasks")
        threads, _, _ = self._counts()
        # Two pools grow to their size: one thread for each slot and one for the extra slot.
        assert threads <= self.threads + 2 * (application.service.slots + 1)
        cache = application.service.workers.all[0].cache
        assert all(front.users == 0 for front in cache._prefixes.values())
        assert resident_bytes(_own()) - self.resident < memory
        answer = exchange(self._server.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])
        self._idle()  # it is counted after its client has it
        check_metrics(self._server.port)

    def _idle(self) -> None:
        application = self._server.application
        until(
            lambda: (
                not (
                    application.admission.running
                    or application.admission.queued
                    or application.documents.running
                    or application.bodies.count
                )
            ),
            60,
            "the end of all requests",
        )
        gc.collect()

    def _connections_are_over(self) -> bool:
        _, descriptors, tasks = self._counts()
        return descriptors <= self.descriptors + 1 and tasks <= self.tasks + 1

    def _counts(self) -> tuple[int, int, int]:
        """Threads, descriptors, tasks of the server's loop."""
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return threading.active_count(), descriptors, self._server.tasks()


def check_metrics(port: int) -> None:
    """What is counted twice was counted the same both times."""
    counts = _counters(exchange(port, "GET", "/metrics").body.decode())

    def total(name: str, *labels: str) -> float:
        return sum(
            v for (n, text), v in counts.items() if n == name and all(label in text for label in labels)
        )

    streams = [total("hapi_requests_total", f'route="{path}"', 'status="200"')
               for path in (EXTRACT, SAMPLES, "/v1/tensors")]  # fmt: skip
    assert sum(streams) == total("hapi_tenant_served_total")
    assert total("hapi_requests_total", 'status="499"') == total("hapi_cancelled_total")
    shed, told = total("hapi_tenant_shed_total"), total("hapi_requests_total", 'status="429"')
    assert told <= shed <= told + total("hapi_cancelled_total")  # some were gone when they were to be told
    assert total("hapi_dropped_readers_total") <= total("hapi_cancelled_total")
    assert total("hapi_tenant_sent_bytes_total") == total("hapi_sent_bytes_total")
    assert total("hapi_requests_total", 'status="500"') == 0
    for name in (
        "hapi_requests_running",
        "hapi_requests_queued",
        "hapi_tenant_running",
        "hapi_tenant_queued",
    ):
        assert total(name) == 0


def _counters(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name, _, labels = sample.partition("{")
            found[name, labels] = float(value)
    return found


def _own() -> int:
    return int(Path("/proc/self").resolve().name)
