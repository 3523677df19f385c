"""Ranges over HTTP: every byte in its place, few requests over kept connections, and hostile answers refused."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import make_certificate
from support.tiny_http import Reply, TinyServer, serving, tls_server

from hapi.errors import BadRequestError, HapiError, NotFoundError, TransportError
from hapi.store.base import ReadPart
from hapi.store.http import ranges as ranges_module
from hapi.store.http.ranges import GAP_BYTES, HttpRanges
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits

DATA = bytes(n * 7 % 251 for n in range(300_000))


def asked(request: bytes) -> tuple[int, int]:
    """The bytes (end excluded) that a request asks for."""
    match = re.search(rb"Range: bytes=(\d+)-(\d+)\r\n", request)
    if match is None:  # a look whether TLS is spoken here
        raise ConnectionAbortedError
    return int(match[1]), int(match[2]) + 1


def ranged(start: int, stop: int, body: bytes, size: int = len(DATA)) -> bytes:
    """An answer that says that it has the bytes ``start..stop``."""
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {stop - start}\r\n"
    return head.encode() + f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n\r\n".encode() + body


def good(connection: socket.socket, request: bytes) -> bool:
    """Answer as a server that holds :data:`DATA` does."""
    start, stop = asked(request)
    connection.sendall(ranged(start, stop, DATA[start:stop]))
    return True


@contextmanager
def reading(reply: Reply, timeout: float = 240.0, **limits: float) -> Iterator[tuple[HttpRanges, TinyServer]]:
    with serving(reply) as server:
        transport = HttpTransport(
            server.url,
            timeout=timeout,
            answer_limits=AnswerLimits(**{"rate": 1024, "window": 240.0, **limits}),
        )
        reader = HttpRanges(transport, lambda key: f"/of/{key}", headers={"X-Mine": "1"})
        try:
            yield reader, server
        finally:
            transport.close()
            reader.close()


def parts_of(ranges: list[tuple[int, int]]) -> list[ReadPart]:
    return [ReadPart("one", start, memoryview(bytearray(length))) for start, length in ranges]


def test_parts_are_filled_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_module, "SLICE_BYTES", 50_000)
    parts = parts_of([(0, 120_000), (250_000, 50_000), (130_000, 0), (200_000, 3)])
    told: list[int] = []
    with reading(good) as (reader, server):
        reader.read_many(parts, told.append)
        assert server.connections <= 4
        assert all(b"X-Mine: 1" in request and b"/of/one" in request for request in server.requests)
    assert all(bytes(part.out) == DATA[part.start : part.start + len(part.out)] for part in parts)
    assert sorted(told) == [0, 1, 2, 3]


def test_connections_are_kept() -> None:
    with reading(good) as (reader, server):
        for start in range(0, 100_000, 10_000):
            reader.read_many(parts_of([(start, 1000)]))
        assert (server.connections, len(server.requests)) == (1, 10)


def test_neighbours_are_one_request_and_far_ones_are_not() -> None:
    parts = parts_of([(0, 1000), (1000, 500), (1500 + GAP_BYTES, 10), (1511 + 2 * GAP_BYTES, 10)])
    with reading(good) as (reader, server):
        reader.read_many(parts)
        found = sorted(asked(request) for request in server.requests)
    assert found == [(0, 1510 + GAP_BYTES), (1511 + 2 * GAP_BYTES, 1521 + 2 * GAP_BYTES)]
    assert all(bytes(part.out) == DATA[part.start : part.start + len(part.out)] for part in parts)


@pytest.fixture(scope="module")
def holder() -> Iterator[HttpRanges]:
    with reading(good) as (reader, _):
        yield reader


@given(ranges=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 90_000)), max_size=8))
def test_any_parts_even_those_that_overlap(holder: HttpRanges, ranges: list[tuple[int, int]]) -> None:
    parts = parts_of(ranges)
    told: list[int] = []
    holder.read_many(parts, told.append)
    assert all(bytes(part.out) == DATA[part.start : part.start + len(part.out)] for part in parts)
    assert sorted(told) == list(range(len(parts)))


def other_range(connection: socket.socket, request: bytes) -> bool:
    start, stop = asked(request)
    connection.sendall(ranged(start + 1, stop + 1, DATA[start + 1 : stop + 1]))
    return True


def whole(connection: socket.socket, request: bytes) -> bool:
    del request
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA) + DATA)
    return True


def untold(connection: socket.socket, request: bytes) -> bool:
    del request
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\n\r\n" + bytes(10))
    return True


def shorter(connection: socket.socket, request: bytes) -> bool:
    """Says in one header that it has the range, in the other that it has less."""
    start, stop = asked(request)
    answer = ranged(start, stop, DATA[start:stop])
    connection.sendall(answer.replace(b"Content-Length: 10\r\n", b"Content-Length: 9\r\n"))
    return True


def endless(connection: socket.socket, request: bytes) -> bool:
    """Has no length: what comes may be more than there is room for."""
    start, stop = asked(request)
    answer = ranged(start, stop, DATA[start:])
    connection.sendall(answer.replace(b"Content-Length: 10\r\n", b""))
    return False


@pytest.mark.parametrize("reply", [other_range, whole, untold, shorter, endless])
def test_another_range_than_asked_for_is_refused(reply: Reply) -> None:
    part = parts_of([(100, 10)])
    with reading(reply) as (reader, _), pytest.raises(HapiError) as caught:
        reader.read_many(part)
    assert isinstance(caught.value, BadRequestError | TransportError)
    assert bytes(part[0].out) == bytes(10)


def test_an_answer_that_breaks_off_is_an_error() -> None:
    def cut(connection: socket.socket, request: bytes) -> bool:
        start, stop = asked(request)
        connection.sendall(ranged(start, stop, DATA[start : stop - 1]))
        return False

    with reading(cut) as (reader, _), pytest.raises(TransportError, match="broke in the middle"):
        reader.read_many(parts_of([(0, 1000)]))


def test_an_answer_that_drips_is_given_up() -> None:
    over = threading.Event()

    def drip(connection: socket.socket, request: bytes) -> bool:
        start, stop = asked(request)
        connection.sendall(ranged(start, stop, b""))
        while not over.wait(0.05):
            connection.sendall(b"x")
        return False

    try:
        with (
            reading(drip, 0.4, rate=100_000, window=0.3) as (reader, _),
            pytest.raises(TransportError, match="brought"),
        ):
            reader.read_many(parts_of([(0, 100_000)]))
    finally:
        over.set()


def test_errors_of_the_server_are_its_own() -> None:
    body = b'{"type":"urn:hapi:problem:not-found","title":"Not found","status":404,"detail":"no such pack"}'
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n"

    def absent(connection: socket.socket, request: bytes) -> bool:
        del request
        connection.sendall(head % len(body) + body)
        return True

    with reading(absent) as (reader, _), pytest.raises(NotFoundError, match="no such pack"):
        reader.read_many(parts_of([(0, 10), (200_000, 10)]))


def test_after_a_failure_nobody_writes_into_the_parts() -> None:
    """One range fails at once, another is on its way: its bytes must not come into memory that was given back."""
    slow = threading.Event()

    def reply(connection: socket.socket, request: bytes) -> bool:
        start, stop = asked(request)
        if start == 0:
            return False
        slow.wait(0.3)
        connection.sendall(ranged(start, stop, DATA[start:stop]))
        return True

    parts = parts_of([(0, 10), (200_000, 10)])
    with reading(reply) as (reader, _):
        with pytest.raises(TransportError):
            reader.read_many(parts)
        before = bytes(parts[1].out)
        slow.set()
        reader.read_many(parts_of([(200_000, 10)]))  # over the same threads: those that were at work are done
        assert bytes(parts[1].out) == before


@pytest.mark.slow
def test_over_tls(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, -1, 1)
    parts = parts_of([(5, 200_000)])
    with serving(good, tls_server(certificate)) as server:
        transport = HttpTransport(server.url, ca_file=str(certificate))
        reader = HttpRanges(transport, lambda key: f"/{key}")
        reader.read_many(parts)
        transport.close()
        reader.close()
    assert bytes(parts[0].out) == DATA[5:200_005]
