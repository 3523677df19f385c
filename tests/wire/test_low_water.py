"""Reading answers in large steps: all bytes come, soon, whatever their number and the link; and in few steps."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_http import Reply, serving, tls_server

from hapi.errors import HapiError, TransportError
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import NO_IDS, FrameHeader, StreamEnd, TensorSpec, data_frame, end_frame
from hapi.wire.transport import low_water
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.low_water import LOW_WATER

BUFFER = 8192
"""Of :mod:`io`: what is wanted beyond it is read straight into its place."""
SIZES = [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, LOW_WATER - 1, LOW_WATER, LOW_WATER + 1, 3 * LOW_WATER + 5]


def frames(size: int) -> bytes:
    """The body of an answer with ``size`` bytes in one tensor."""
    data = np.arange(size, dtype=np.int64).astype(np.uint8)
    header = FrameHeader(NO_IDS, (TensorSpec("data", "uint8", (size,)),))
    return b"".join([*data_frame(header, [data.data]), bytes(end_frame(StreamEnd(1, 0, {})))])


def read(reader: FrameReader) -> bytes:
    data = bytearray()

    def sink(header: FrameHeader) -> list[memoryview]:
        data.extend(bytes(header.tensors[0].nbytes))
        return [memoryview(data)]

    while not isinstance(reader.next(sink), StreamEnd):
        pass
    return bytes(data)


def fetched(url: str, timeout: float = 60.0, ca_file: Path | None = None, answers: int = 2) -> list[bytes]:
    """These answers over one connection."""
    transport = HttpTransport(url, timeout=timeout, ca_file=None if ca_file is None else str(ca_file))
    try:
        return [transport.stream("/v1/samples", {}, read) for _ in range(answers)]
    finally:
        transport.close()


def in_pieces(body: bytes, size: int, pause: float, chunked: bool = False, most: int | None = None) -> Reply:
    """``body`` in packets of ``size`` bytes, one every ``pause`` seconds; the connection ends after ``most`` bytes."""

    def reply(connection: socket.socket, request: bytes) -> bool:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        form = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        connection.sendall(f"HTTP/1.1 200 OK\r\n{form}\r\n\r\n".encode())
        for piece in pieces(body[:most], size):
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            time.sleep(pause)
        connection.sendall(b"0\r\n\r\n" if chunked else b"")
        return most is None

    return reply


def stopping_after(count: int) -> Reply:
    """So many bytes of an answer, and then silence."""

    def reply(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + frames(400_000)[:count])
        time.sleep(20)
        return False

    return reply


def pieces(body: bytes, size: int) -> Iterator[bytes]:
    return (body[i : i + size] for i in range(0, len(body), size))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(wanted, come) of every read from a socket."""
    found: list[tuple[int, int]] = []
    real = low_water._LowWater.readinto

    def readinto(self: Any, buffer: Any) -> int:
        count = real(self, buffer)
        found.append((len(buffer), count))
        return count

    monkeypatch.setattr(low_water._LowWater, "readinto", readinto)
    return found


@pytest.mark.parametrize("form", ["plain", "chunked", "tls"])
@pytest.mark.parametrize("size", SIZES)
def test_all_of_it_comes_whatever_its_size(form: str, size: int, request: pytest.FixtureRequest) -> None:
    certificate = request.getfixturevalue("certificate") if form == "tls" else None
    reply = in_pieces(frames(size), 50_000, 0, chunked=form == "chunked")
    with serving(reply, tls_server(certificate) if certificate else None) as server:
        first, second = fetched(server.url, ca_file=certificate)
        assert server.connections == 1
    assert first == second and len(first) == size
    assert np.array_equal(np.frombuffer(first, np.uint8), np.arange(size, dtype=np.int64).astype(np.uint8))


def test_the_reader_is_not_woken_for_every_packet(steps: list[tuple[int, int]]) -> None:
    size = 1 << 20
    with serving(in_pieces(frames(size), 1024, 0.0002)) as server:
        assert len(fetched(server.url)[0]) == size
    assert len(steps) < 2 * (size / LOW_WATER + 30), "for 2048 packets"


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_slow_link_is_not_silent(tls: bool, request: pytest.FixtureRequest) -> None:
    """What comes in the longest silence is far below the mark."""
    certificate = request.getfixturevalue("certificate") if tls else None

    def reply(connection: socket.socket, request: bytes) -> bool:
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            for piece in pieces(body, 1000):
                connection.sendall(piece)
                time.sleep(0.05)
        return False

    body = frames(60_000)
    with serving(reply, tls_server(certificate) if tls else None) as server:
        for again in reversed(range(6)):
            try:
                found = fetched(server.url, 1.5, certificate, answers=1)
                break
            except TransportError:  # there was silence where this machine stood still
                assert again
    assert len(found[0]) == 60_000


def test_silence_ends_after_its_time() -> None:
    with serving(stopping_after(100_000)) as server:
        started = time.monotonic()
        with pytest.raises(TransportError, match="no answer in time"):
            fetched(server.url, 0.3)
        assert time.monotonic() - started < 50


@pytest.mark.parametrize("most", [5000, 100_000, 299_000])
def test_an_early_end_is_told_at_once(most: int) -> None:
    with serving(in_pieces(frames(300_000), 50_000, 0, most=most)) as server:
        started = time.monotonic()
        with pytest.raises(HapiError, match=r"cut off|broke in the middle"):
            fetched(server.url)
        assert time.monotonic() - started < 30


def test_close_breaks_a_read_that_waits_for_much() -> None:
    with serving(stopping_after(50_000)) as server:
        transport = HttpTransport(server.url, timeout=60)
        threading.Timer(0.5, transport.close).start()
        started = time.monotonic()
        with pytest.raises(HapiError):
            transport.stream("/v1/samples", {}, read)
        assert time.monotonic() - started < 50
