"""A store that hangs in the middle of an answer: the server goes on, and nobody's slot is lost."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.certificates import self_signed
from support.http_tools import SAMPLES, Known, exchange, request_bytes, served, until
from support.waiting import PATIENCE

from hapi.data.dataset import Dataset
from hapi.data.sample_directory import Located
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.transport.http import HttpTransport

STUCK = 0.3


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> Iterator[threading.Event]:
    """Set once a read of a long sample, of more than 60 bytes, waits at the gate: the second one, to be sent."""
    monkeypatch.setattr("hapi.server.stored_bytes.LEAST_FRAME", 30)
    monkeypatch.setattr("hapi.server.stored_bytes.FRAME_BYTES", 30)
    read, waits = Dataset.read_part, threading.Event()

    def wait(self: Dataset, place: Located, start: int, out: memoryview) -> None:
        waits.set()
        gate.wait(PATIENCE)
        read(self, place, start, out)

    monkeypatch.setattr(Dataset, "read_part", wait)
    yield waits
    gate.set()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


def tls_of(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    return tls


def stored(reader: FrameReader) -> list[bytes]:
    """The samples' bytes of an answer."""
    found, buffers = list[bytes](), list[bytearray]()

    def room(header: FrameHeader) -> list[memoryview]:
        buffers[:] = [bytearray(t.nbytes) for t in header.tensors]
        return [memoryview(b) for b in buffers]

    while not isinstance(reader.next(room), StreamEnd):
        found.append(bytes(buffers[0]))
    return found


def test_it_holds_up_nobody_else_over_tls(
    folder: Path,
    known: Known,
    certificate: tuple[Path, Path],
    hangs: threading.Event,
    gate: threading.Event,
) -> None:
    with (
        served(folder, tls=tls_of(certificate)) as server,
        ThreadPoolExecutor(1) as asking,
    ):
        way = HttpTransport(f"https://127.0.0.1:{server.port}", ca_file=str(certificate[0]), timeout=PATIENCE)
        try:
            answer = asking.submit(way.stream, SAMPLES, known.samples([5, 0]), stored)
            assert hangs.wait(PATIENCE)
            assert way.call("GET", "/healthz") == {"status": "alive"}
            assert way.call("GET", "/v1/status")["queue"]["running"] == 1
            gate.set()
            samples = known.dataset.read(np.array([5, 0]))
            assert answer.result(PATIENCE) == [samples.sample(i).tobytes() for i in (0, 1)]
        finally:
            gate.set()
            way.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_who_leaves_meanwhile_gives_the_slot_back(
    folder: Path,
    known: Known,
    request: pytest.FixtureRequest,
    hangs: threading.Event,
    gate: threading.Event,
    secure: bool,
) -> None:
    certificate = request.getfixturevalue("certificate") if secure else None
    tls = None if certificate is None else tls_of(certificate)
    with served(folder, tls=tls, stuck_seconds=STUCK) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
        if certificate is not None:
            sock = ssl.create_default_context(cafile=str(certificate[0])).wrap_socket(
                sock, server_hostname="127.0.0.1"
            )
        sock.sendall(request_bytes(SAMPLES, json.dumps(known.samples([5])).encode()))
        assert hangs.wait(PATIENCE)
        until(server.service.watch.stuck, 20, "the server's word that nothing moves")
        sock.close()
        until(lambda: server.application.running == 0, 20, "its slot")
        until(lambda: server.service.watch.lost.count == 1, 20, "the loss of the thread in the store")
        gate.set()
        until(lambda: server.service.watch.lost.count == 0, 20, "the lost thread")


def test_the_deadline_ends_it_with_the_reason(
    folder: Path, known: Known, hangs: threading.Event, gate: threading.Event
) -> None:
    with served(folder, stuck_seconds=STUCK, max_request_seconds=1.0) as server:
        answer = exchange(server.port, "POST", SAMPLES, known.samples([5]))
        assert b"the store has not answered" in answer.body
        gate.set()
        server.idle()
