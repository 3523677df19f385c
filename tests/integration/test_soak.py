"""Thousands of small requests to one server process: what it holds in memory does not grow."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from support.harness import server
from support.hostile_tools import resident_bytes
from support.http_tools import EXTRACT, SAMPLES, TENSORS, Known, make_store, request_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WARM, AT_ONCE = 1_000, 6
PER_CONNECTION = 500
"""Requests of a connection, so that some end and others begin."""
TENANTS = {"vision": "0f7c1d9e4b6a8253", "audio": "1a7c1d9e4b6a8254", "students": "2b7c1d9e4b6a8255"}


def mixture(known: Known) -> list[list[tuple[bytes, int]]]:
    """For each tenant (request, status) of small requests of every kind, good and bad."""
    posts: list[tuple[str, dict[str, Any], int]] = [
        (EXTRACT, known.extract([7], split=1), 200),
        (EXTRACT, known.extract([3, 39, 0, 17], split=4), 200),
        (SAMPLES, known.samples([5, 0, 5]), 200),
        (SAMPLES, known.samples([39]), 200),
        (SAMPLES, known.samples([1, 2, 3, 4]), 200),
        (TENSORS, known.tensors(), 200),
        (SAMPLES, known.samples([40]), 404),
        (EXTRACT, known.extract([40], split=1), 404),
        (SAMPLES, {"ids": [1]}, 400),
    ]
    gets = [("/v1", 200), ("/v1/datasets/digits", 200), ("/v1/datasets/none", 404), ("/v1/models", 200)]
    plain = [
        *((path, json.dumps(document).encode(), "POST", status) for path, document, status in posts),
        *((path, b"", "GET", status) for path, status in gets),
    ]
    return [
        [
            (request_bytes(path, body, method, Authorization=f"Bearer {token}"), status)
            for path, body, method, status in plain
        ]
        for token in TENANTS.values()
    ]


def answer_of(reader: BinaryIO) -> tuple[int, bytes]:
    """Status and body of the next answer, with as little work as will do: it is the server that is to be busy."""
    status = int(reader.readline().split()[1])
    length = 0
    while line := reader.readline().strip():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return status, reader.read(length)


@pytest.mark.parametrize("requests_in_all", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_memory_after_thousands_of_requests(tmp_path: Path, requests_in_all: int) -> None:
    folder = make_store(tmp_path / "store")
    requests = mixture(Known(folder))
    kinds = len(requests[0])
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("".join(f"{name}: {{token: {token}}}\n" for name, token in TENANTS.items()))
    numbers, lock = itertools.count(), threading.Lock()
    with server(folder, "--tenants", str(tenants), "--log-level", "warning", fresh=True) as running:

        def ask(until: int) -> None:
            """One keep-alive connection after the other, until this many were asked for in all."""
            while True:
                with (
                    socket.create_connection(("127.0.0.1", running.port), timeout=240) as sock,
                    sock.makefile("rb") as reader,
                ):
                    for _ in range(PER_CONNECTION):
                        with lock:
                            number = next(numbers)
                        if number >= until:
                            return
                        of_tenant = requests[number // kinds % len(requests)]
                        request, status = of_tenant[number % kinds]
                        sock.sendall(request)
                        assert (got := answer_of(reader))[0] == status, (request[:60], got[1][:300])

        def resident_after(count: int) -> int:
            with ThreadPoolExecutor(AT_ONCE) as clients:
                list(clients.map(ask, [count] * AT_ONCE))
            return resident_bytes(running.process.pid)

        first = resident_after(WARM)
        step = requests_in_all // 5
        course = [resident_after(count) for count in range(step, requests_in_all + 1, step)]
        assert abs(course[-1] - first) < 0.05 * first, (first, course)
