"""Memory of a real server process stays bounded, whatever is asked of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.harness import ServerProcess, server
from support.hostile_tools import peak_bytes, resident_bytes
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    Known,
    check_problem,
    exchange,
    metric,
    request_bytes,
    until,
)
from support.waiting import PATIENCE

from hapi.server.lifecycle.run import HEALTH_SECONDS, IDLE_SECONDS
from hapi.wire.references import TransformSpec

MIB = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(folder: Path, known: Known) -> Iterator[ServerProcess]:
    with server(folder, "--max-running", "2", "--max-queued", "16", fresh=True) as process:
        known.check_features(exchange(process.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        yield process
        known.check_features(exchange(process.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        assert process.process.poll() is None


def test_transforms_of_4096_pixels(running: ServerProcess, known: Known) -> None:
    """Neither a transform that does not fit its model, nor one that does, makes the server take gigabytes."""
    before = peak_bytes(running.process.pid)
    huge = TransformSpec(resize=4096, crop=4096)
    ids = [n % 40 for n in range(2000)]
    document = known.extract(ids, transform=huge.to_json())
    check_problem(exchange(running.port, "POST", EXTRACT, document), 422, "4096")
    document["model"] = known.model_at(4096)
    check_problem(exchange(running.port, "POST", EXTRACT, document), 413, "--request-size")
    assert peak_bytes(running.process.pid) - before < 400 * MIB


def test_a_crowd_of_200(running: ServerProcess, known: Known) -> None:
    pid = running.process.pid
    before = resident_bytes(pid)
    everyone = threading.Barrier(200)

    def ask(number: int) -> tuple[list[int], int, bytes]:
        ids = [(number + n) % 40 for n in range(32)]
        everyone.wait(240)
        answer = exchange(running.port, "POST", EXTRACT, known.extract(ids))
        if answer.status == 429:
            check_problem(answer, 429)
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        return ids, answer.status, answer.body

    for _ in range(3):
        with ThreadPoolExecutor(200) as crowd:
            answers = list(crowd.map(ask, range(200)))
        assert {status for _, status, _ in answers} <= {200, 429}
        good = [(ids, body) for ids, status, body in answers if status == 200]
        assert len(good) >= 18
        for ids, body in good:
            known.check_features(body, ids)
    until(lambda: metric(running.port, "hapi_requests_running") == 0, 10, "the end of all")
    assert peak_bytes(pid) - before < 700 * MIB


def test_bodies_that_never_end(running: ServerProcess, known: Known) -> None:
    """A hundred and fifty bodies that never end take their own bytes, and no slots."""
    pid = running.process.pid
    before = resident_bytes(pid)
    body = json.dumps(known.samples([n % 40 for n in range(60_000)])).encode()
    halves = []
    for _ in range(150):
        sock = socket.create_connection(("127.0.0.1", running.port))
        sock.sendall(request_bytes(SAMPLES, body)[:-1])
        halves.append(sock)
    grown = resident_bytes(pid) - before
    assert grown < 400 * MIB
    known.check_features(exchange(running.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
    for sock in halves:
        sock.close()


@pytest.mark.parametrize("clients", [30, pytest.param(180, marks=pytest.mark.long)])
def test_clients_that_left_leave_nothing(running: ServerProcess, known: Known, clients: int) -> None:
    data = request_bytes(EXTRACT, json.dumps(known.extract([n % 40 for n in range(2000)])).encode())
    pid = running.process.pid

    def leave(number: int) -> None:
        sock = socket.create_connection(("127.0.0.1", running.port), timeout=240)
        sock.sendall(data)
        if number % 3:
            sock.recv(1000)
        sock.close()

    def crowds(enough: int = 0) -> tuple[int, int, int]:
        """Threads, descriptors and bytes after some crowds; fewer bytes than ``enough`` are waited for."""
        for _ in range(3):
            with ThreadPoolExecutor(10) as crowd:
                list(crowd.map(leave, range(clients // 3)))
            until(lambda: metric(running.port, "hapi_requests_running") == 0, 60, "the end of all")
        # What a busy server keeps for the next request differs by 150 MB; an idle one gives it back.
        deadline = time.monotonic() + (PATIENCE if enough else IDLE_SECONDS + 2 * HEALTH_SECONDS)
        memory = resident_bytes(pid)
        while time.monotonic() < deadline and memory >= enough:
            memory = min(memory, resident_bytes(pid))
            time.sleep(0.1)
        tasks, descriptors = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("task", "fd"))
        return tasks, descriptors, memory

    threads, descriptors, memory = crowds()
    now = crowds(memory + 4 * MIB)
    assert now[0] <= threads
    assert now[1] <= descriptors + 2  # the connection of the last question may still be closing
    assert now[2] - memory < 4 * MIB


def test_models_that_cannot_be_loaded_are_not_remembered(running: ServerProcess, known: Known) -> None:
    before = resident_bytes(running.process.pid)
    document = known.extract()
    for number in range(20):
        document["model"] |= {"digest": f"{number:032x}", "weights": f"random:{number}"}
        check_problem(exchange(running.port, "POST", EXTRACT, document), 409, "digest")
    # Twenty models of 45 MiB; what one load leaves to the garbage collector is a tenth of that.
    assert resident_bytes(running.process.pid) - before < 400 * MIB
    assert metric(running.port, "hapi_model_cache_bytes") < 5 * MIB
