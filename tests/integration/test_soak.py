"""Twenty thousand small requests to one server process: what it holds in memory does not grow."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import server
from hostile_tools import resident_bytes
from http_tools import EXTRACT, SAMPLES, TENSORS, Known, make_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REQUESTS, WARM, AT_ONCE = 20_000, 1_000, 6
PER_CONNECTION = 500
"""Requests of a connection, so that some end and others begin."""
TENANTS = {"vision": "0f7c1d9e4b6a8253", "audio": "1a7c1d9e4b6a8254", "students": "2b7c1d9e4b6a8255"}


def mixture(known: Known) -> list[tuple[str, str, bytes | None, int]]:
    """(method, path, body, status) of small requests of every kind, good and bad."""
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
    return [
        *(("POST", path, json.dumps(document).encode(), status) for path, document, status in posts),
        *(("GET", path, None, status) for path, status in gets),
    ]


def test_memory_after_twenty_thousand_requests(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    requests = mixture(Known(folder))
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("".join(f"{name}: {{token: {token}}}\n" for name, token in TENANTS.items()))
    numbers, lock = itertools.count(), threading.Lock()
    with server(folder, "--tenants", str(tenants), "--log-level", "warning") as running:

        def ask(until: int) -> None:
            """One keep-alive connection after the other, until this many were asked for in all."""
            tokens = list(TENANTS.values())
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
                for _ in range(PER_CONNECTION):
                    with lock:
                        number = next(numbers)
                    if number >= until:
                        connection.close()
                        return
                    method, path, body, status = requests[number % len(requests)]
                    token = tokens[number // len(requests) % len(tokens)]
                    connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
                    response = connection.getresponse()
                    answer = response.read()
                    assert response.status == status, (path, answer[:300])
                connection.close()

        def resident_after(count: int) -> int:
            with ThreadPoolExecutor(AT_ONCE) as clients:
                list(clients.map(ask, [count] * AT_ONCE))
            return resident_bytes(running.process.pid)

        first = resident_after(WARM)
        course = [resident_after(count) for count in range(REQUESTS // 5, REQUESTS + 1, REQUESTS // 5)]
        assert abs(course[-1] - first) < 0.05 * first, (first, course)
