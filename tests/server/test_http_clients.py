"""Clients that leave, stall or come in crowds: the server stops working for them and keeps nothing of them."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    Answer,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    metric,
    received,
    request_bytes,
    served,
    until,
)


@pytest.fixture
def server(folder: Path, known: Known) -> Iterator[ServedApplication]:
    """Many small frames, so that a request goes on for long."""
    with served(folder, cos_batch=1, max_running=2, max_queued=4) as application:
        assert exchange(application.port, "POST", EXTRACT, known.extract()).status == 200
        yield application
        known.check_features(
            exchange(application.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17]
        )


def counted_forwards(server: ServedApplication, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every forward pass."""
    done: list[int] = []
    device = server.service.workers.all[0].device
    begin = device.begin

    def counting(*args: Any, **kwargs: Any) -> Any:
        done.append(1)
        return begin(*args, **kwargs)

    monkeypatch.setattr(device, "begin", counting)
    return done


def long_request(known: Known, samples: int = 4000) -> bytes:
    """About 16 KiB of features a sample: far more than sockets hold."""
    return request_bytes(EXTRACT, json.dumps(known.extract([n % 40 for n in range(samples)])).encode())


def opened(port: int, data: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=240)
    sock.sendall(data)
    return sock


def open_descriptors() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def reset(sock: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("leave", [reset, socket.socket.close, lambda s: s.shutdown(socket.SHUT_RDWR)],
                         ids=["reset", "close", "shutdown"])  # fmt: skip
def test_a_client_that_leaves_in_the_middle(
    server: ServedApplication, known: Known, monkeypatch: pytest.MonkeyPatch, leave: Any
) -> None:
    done = counted_forwards(server, monkeypatch)
    before = metric(server.port, "hapi_cancelled_total")
    sock = opened(server.port, long_request(known))
    sock.recv(20_000)
    leave(sock)
    at_leave = len(done)
    until(lambda: metric(server.port, "hapi_cancelled_total") == before + 1, 10, "the cancellation")
    server.idle()
    assert metric(server.port, "hapi_requests_running") == 0
    assert len(done) < 4000
    stopped = len(done)
    # What was under way when the news came, and what a scheduling delay of this machine allows.
    assert stopped - at_leave < 2000
    exchange(server.port, "GET", "/healthz")
    assert len(done) == stopped
    sock.close()


@pytest.mark.slow
def test_a_client_that_leaves_with_the_whole_answer(server: ServedApplication, known: Known) -> None:
    """It is no cancellation when the connection closes behind the last byte."""
    before = metric(server.port, "hapi_cancelled_total")
    for _ in range(30):
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
    server.idle()
    assert metric(server.port, "hapi_cancelled_total") == before


def test_a_client_that_leaves_the_queue(
    server: ServedApplication, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [opened(server.port, long_request(known)) for _ in range(2)]
    until(lambda: metric(server.port, "hapi_requests_running") == 2, 10, "two running requests")
    waiting = [opened(server.port, long_request(known, 8)) for _ in range(4)]
    until(lambda: metric(server.port, "hapi_requests_queued") == 4, 10, "four waiting requests")
    answer = exchange(server.port, "POST", EXTRACT, known.extract())
    check_problem(answer, 429, "come back")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    for sock in waiting:
        reset(sock)
    until(lambda: metric(server.port, "hapi_requests_queued") == 0, 10, "an empty queue")
    for sock in holders:
        reset(sock)
    server.idle()


def test_bodies_that_wait_for_the_parser_are_counted(
    folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in memory still; whoever leaves takes its own away."""
    monkeypatch.setattr("hapi.server.http.bodies.MAX_BODIES", 4)
    parsing, release = threading.Event(), threading.Event()
    with served(folder) as slow:
        parse = slow.service.request

        def held(*args: Any) -> Any:
            parsing.set()
            release.wait(240)
            return parse(*args)

        monkeypatch.setattr(slow.service, "request", held)
        first = opened(slow.port, long_request(known, 8))
        assert parsing.wait(240)
        waiting = [opened(slow.port, long_request(known, 8)) for _ in range(3)]
        until(lambda: slow.application.bodies.count == 4, 10, "three bodies behind the first")
        check_problem(exchange(slow.port, "POST", EXTRACT, known.extract()), 429, "come back")
        for sock in waiting:
            reset(sock)
        until(lambda: slow.application.bodies.count == 1, 10, "the end of those that left")
        release.set()
        until(lambda: slow.application.bodies.count == 0, 10, "the end of the first body")
        reset(first)
        slow.idle()


def test_a_client_that_leaves_while_its_model_loads(
    folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is not given away before the thread is free, and nothing piles up behind it."""
    release, begun = threading.Event(), []
    with served(folder, max_running=1, max_queued=50) as slow:
        load = slow.service.workers.all[0].prefixes.load

        def held(*args: Any) -> Any:
            begun.append(1)
            release.wait(240)
            return load(*args)

        monkeypatch.setattr(slow.service.workers.all[0].prefixes, "load", held)
        first = opened(slow.port, long_request(known, 8))
        until(lambda: begun, 10, "the load")
        reset(first)
        for _ in range(20):
            reset(opened(slow.port, long_request(known, 8)))
        until(lambda: metric(slow.port, "hapi_requests_queued") == 0, 10, "an empty queue")
        assert metric(slow.port, "hapi_requests_running") == 1
        release.set()
        slow.idle()
        assert len(begun) == 1
        answer = exchange(slow.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])


@pytest.mark.slow
def test_readers_that_stall_are_dropped(folder: Path, known: Known) -> None:
    with served(folder, cos_batch=8, max_running=2, send_timeout=0.5) as impatient:
        stalled = []
        for _ in range(2):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", impatient.port))
            sock.sendall(long_request(known))
            stalled.append(sock)
        until(lambda: metric(impatient.port, "hapi_cancelled_total") == 2, 30, "the end of both")
        impatient.idle()
        assert metric(impatient.port, "hapi_requests_running") == 0
        known.check_features(exchange(impatient.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        for sock in stalled:
            sock.close()


@pytest.mark.slow
def test_a_reader_that_is_slow_but_reads_gets_all(folder: Path, known: Known) -> None:
    ids = [n % 40 for n in range(400)]
    with served(folder, cos_batch=8, send_timeout=30.0) as patient:
        sock = opened(patient.port, request_bytes(EXTRACT, json.dumps(known.extract(ids)).encode()))
        data = bytearray()
        while part := sock.recv(200_000):
            data += part
            head = bytes(data[:500]).partition(b"\r\n\r\n")[0]
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            if len(data) == len(head) + 4 + length:
                break
            threading.Event().wait(0.01)
        known.check_features(bytes(data[len(head) + 4 :]), ids)
        sock.close()


@pytest.mark.slow
def test_a_deadline_for_the_whole_request(folder: Path, known: Known) -> None:
    """A reader that takes a little now and then cannot hold a slot for ever."""
    with served(folder, cos_batch=8, max_request_seconds=1.0) as strict:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", strict.port))
        sock.sendall(long_request(known))
        sock.settimeout(1)

        def ended() -> bool:
            try:
                return metric(strict.port, "hapi_cancelled_total") == 1 or not sock.recv(2000)
            except TimeoutError:  # its layers are still loading
                return False
            except ConnectionResetError:
                return True

        until(ended, 60, "the deadline")
        strict.idle()
        sock.close()


@pytest.mark.slow
def test_a_crowd(folder: Path, known: Known) -> None:
    """200 at once: each gets its answer, or a 429 that says when to return."""
    with served(folder, cos_batch=8, max_running=2, max_queued=16) as small:
        everyone = threading.Barrier(200)

        def ask(number: int) -> tuple[list[int], Answer]:
            ids = [number % 40, (7 * number) % 40, 3]
            everyone.wait(240)
            return ids, exchange(small.port, "POST", EXTRACT, known.extract(ids))

        with ThreadPoolExecutor(200) as crowd:
            answers = list(crowd.map(ask, range(200)))
        served_well = [(ids, a) for ids, a in answers if a.status == 200]
        assert len(served_well) >= 18
        assert {a.status for _, a in answers} <= {200, 429}
        for ids, answer in served_well:
            known.check_features(answer.body, ids)
        for _, answer in answers:
            if answer.status == 429:
                check_problem(answer, 429)
                assert 1 <= int(answer.headers["Retry-After"]) <= 60
        small.idle()  # a client may have all of its answer before the slot is free


@pytest.mark.slow
def test_nothing_is_left_of_hundreds_that_left(folder: Path, known: Known) -> None:
    """Threads and file descriptors after 300 clients that left at every stage of a request."""
    with served(folder, cos_batch=4, max_running=4, max_queued=400) as busy:

        def leave(stage: int) -> None:
            data = long_request(known, 400) if stage % 2 else request_bytes(
                SAMPLES, json.dumps(known.samples([1] * 2000)).encode()
            )  # fmt: skip
            cut = [1, len(data) // 2, len(data) - 1, len(data), len(data), len(data)][stage % 6]
            sock = opened(busy.port, data[:cut])
            if stage % 6 >= 4:
                sock.recv(1 + 50_000 * (stage % 5))
            (reset if stage % 3 else socket.socket.close)(sock)

        def crowd(count: int) -> None:
            with ThreadPoolExecutor(20) as clients:
                list(clients.map(leave, range(count)))
            busy.idle(60)
            until(lambda: busy.application.admission.queued == 0, 10, "an empty queue")

        crowd(60)
        gc.collect()
        threads, descriptors = threading.active_count(), open_descriptors()
        crowd(300)
        until(lambda: open_descriptors() <= descriptors, 20, "the end of its connections")
        pools = 2 * (busy.service.slots + 1)  # they grow when they are needed
        assert threading.active_count() <= threads + pools, "but for threads that the two pools did not have"
        assert busy.application.bodies.count == 0
        assert received(exchange(busy.port, "POST", SAMPLES, known.samples()).body, 3)[0] == [5, 0, 5]
        known.check_features(exchange(busy.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
