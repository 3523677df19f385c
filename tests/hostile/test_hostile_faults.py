"""Faults between the tiers, with real processes: flipped and cut frames, SIGTERM under load, TLS."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.certificates import self_signed
from support.harness import DIGITS_JOB, ServerProcess, losses, report_of, server, train
from support.http_tools import (
    EXTRACT,
    Known,
    check_problem,
    exchange,
    metric,
    raw,
    request_bytes,
    until,
)
from support.proxy import Proxy

from hapi.errors import HapiError
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.transport.http import HttpTransport

pytestmark = pytest.mark.slow
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "10", "--epochs", "4", "--dataset", "digits", "--timeout", "600",
)  # fmt: skip


class Damage:
    """Flips, cuts or shifts every third large piece of the answers in turn, so that retries succeed in the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self.damaged = 0

    def __call__(self, data: bytes) -> bytes | None:
        if len(data) < 8000:
            return data  # documents and small rests pass
        with self._lock:
            self._seen += 1
            if self._seen % 3:
                return data
            self.damaged += 1
            kind = self.damaged % 3
        middle = len(data) // 2
        if kind == 0:
            return None
        if kind == 1:
            return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        return data[:1000] + data[1016:] + bytes(16)


def test_damage_on_the_way_changes_no_result(folder: Path, tmp_path: Path) -> None:
    """Flipped bits, missing bytes and cut connections between server and trainer: retried, never trained on."""
    with server(folder) as running:
        reports = []
        damage = Damage()
        proxy = Proxy(running.port, damage)
        for url in (running.url, f"http://127.0.0.1:{proxy.port}"):
            reports.append(tmp_path / f"report{len(reports)}.json")
            # Answers of one large piece each: at a split that sends more, every answer would be damaged each time.
            train(*JOB, "--split", "8", "--server", url, "--report", str(reports[-1]))
        proxy.close()
    undisturbed, damaged = (report_of(path) for path in reports)
    assert losses(damaged) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert [e["samples"] for e in damaged["epochs"]] == [40] * 4
    assert damage.damaged >= 4
    assert damaged["retries"] >= 2
    assert undisturbed["retries"] == 0


def test_sigterm_in_the_middle_of_requests(folder: Path) -> None:
    known = Known(folder)
    ids = [n % 40 for n in range(1500)]
    with server(folder, "--max-running", "1", "--cos-batch", "8", "--drain-seconds", "60") as running:
        idle = socket.create_connection(("127.0.0.1", running.port))
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(exchange(running.port, "POST", EXTRACT, known.extract(ids)))
        )
        asking.start()
        until(lambda: metric(running.port, "hapi_requests_running") == 1, 30, "a running request")
        running.process.send_signal(signal.SIGTERM)
        until(lambda: exchange(running.port, "GET", "/readyz").status == 503, 5, "draining")
        check_problem(exchange(running.port, "POST", EXTRACT, known.extract()), 503, "another")
        assert exchange(running.port, "GET", "/healthz").status == 200
        asking.join(240)
        known.check_features(answers[0].body, ids)
        assert running.process.wait(240) == 0
        idle.close()


def test_drain_seconds_end_it(folder: Path) -> None:
    """A reader that never reads cannot keep a server from stopping."""
    known = Known(folder)
    with server(folder, "--drain-seconds", "0.5", "--send-timeout", "1h") as running:
        data = json.dumps(known.extract([n % 40 for n in range(4000)])).encode()
        sock = socket.create_connection(("127.0.0.1", running.port))
        sock.sendall(request_bytes(EXTRACT, data))
        until(lambda: metric(running.port, "hapi_requests_running") == 1, 30, "a running request")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(240) == 0
        sock.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"), "DNS:localhost,IP:127.0.0.1")


def test_tls(folder: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    known = Known(folder)
    with server(folder, "--tls-cert", str(cert), "--tls-key", str(key)) as running:
        assert running.url.startswith("https://")
        assert not raw(running.port, b"GET /v1 HTTP/1.1\r\n\r\n", 5).startswith(b"HTTP/1.1 200")
        raw(running.port, b"\x16\x03\x01" + b"\xab" * 400, 5)
        distrustful = HttpTransport(running.url)
        with pytest.raises(HapiError, match="certificate"):
            distrustful.call("GET", "/v1")
        transport = HttpTransport(running.url, ca_file=str(cert))
        assert transport.call("GET", "/v1/datasets/digits")["reference"] == known.dataset.reference.to_json()
        ids = [n % 40 for n in range(400)]
        end = transport.stream(EXTRACT, known.extract(ids), _to_the_end)
        assert end.samples == 400
        transport.close()
        _leave_over_tls(running, known, cert)


def test_slow_and_silent_readers_over_tls(folder: Path, certificate: tuple[Path, Path]) -> None:
    """One that takes a little all the time is not silent, although a whole piece takes it many times the timeout."""
    cert, key = certificate
    # Where this machine stands still for so long, the reader is silent: another one is tried.
    assert any(_took_a_little_all_the_time(folder, cert, key) for _ in range(10)), "this machine stands still"


def _took_a_little_all_the_time(folder: Path, cert: Path, key: Path) -> bool:
    """Whether a reader never paused for long; then it has what it must have."""
    known = Known(folder)
    arguments = (
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(key),
        "--send-timeout",
        "2",
        "--cos-batch",
        "200",
    )
    with server(folder, *arguments) as running:
        context = ssl.create_default_context(cafile=str(cert))
        body = json.dumps(known.extract([n % 40 for n in range(2000)])).encode()
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        plain.connect(("127.0.0.1", running.port))
        sock = context.wrap_socket(plain, server_hostname="localhost")
        sock.sendall(request_bytes(EXTRACT, body))
        longest, before = 0.0, time.monotonic()
        with contextlib.suppress(OSError):
            for _ in range(150):
                if not sock.recv(1 << 14):
                    break
                threading.Event().wait(0.04)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
        text = _metrics_over_tls(context, running.port)
        if (
            "\nhapi_requests_running 1.0" not in text
            or 'hapi_dropped_readers_total{reason="silent"} 0.0' not in text
        ):
            assert max(longest, time.monotonic() - before) > 0.5, text
            return False
        until(
            lambda: (
                'hapi_dropped_readers_total{reason="silent"} 1.0' in _metrics_over_tls(context, running.port)
            ),
            20,
            "the drop of who stopped reading",
        )
        until(
            lambda: "\nhapi_requests_running 0.0" in _metrics_over_tls(context, running.port), 20, "its slot"
        )
        sock.close()
    return True


def _to_the_end(reader: FrameReader) -> StreamEnd:
    while not isinstance(
        header := reader.next(lambda h: [memoryview(bytearray(t.nbytes)) for t in h.tensors]), StreamEnd
    ):
        pass
    return header


def _leave_over_tls(running: ServerProcess, known: Known, cert: Path) -> None:
    """A TLS client that leaves in the middle frees its slot."""
    context = ssl.create_default_context(cafile=str(cert))
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        sock = context.wrap_socket(plain, server_hostname="localhost")
        body = json.dumps(known.extract([n % 40 for n in range(4000)])).encode()
        sock.sendall(request_bytes(EXTRACT, body))
        sock.recv(1000)
        sock.close()

    until(
        lambda: "\nhapi_requests_running 0.0" in _metrics_over_tls(context, running.port),
        20,
        "the end of the request",
    )


def _metrics_over_tls(context: ssl.SSLContext, port: int) -> str:
    with socket.create_connection(("127.0.0.1", port)) as plain:
        sock = context.wrap_socket(plain, server_hostname="localhost")
        sock.sendall(request_bytes("/metrics", b"", "GET", Connection="close"))
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()
