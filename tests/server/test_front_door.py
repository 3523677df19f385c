"""What is said to requests before anybody looks at them: no HTTP, expectations, other hosts, too many connections."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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
    raw,
    request_bytes,
    served,
    until,
)

from hapi.server.http import connections
from hapi.server.lifecycle.log_limits import LimitedHandler

TOKEN = "a-long-secret-token"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedApplication]:
    """One that wants a token."""
    with served(folder, token=TOKEN) as application:
        yield application


@pytest.fixture(scope="module")
def open_server(folder: Path) -> Iterator[ServedApplication]:
    """One that wants none."""
    with served(folder) as application:
        yield application


def parsed(data: bytes) -> Answer:
    """The first answer of what came over a socket."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body[: int(headers.get("Content-Length", len(body)))])


SECRET_LINES = [
    f"Authorization : Bearer {TOKEN}", f"Authorization: Bearer {TOKEN}\x00", f"Bearer {TOKEN}",
    f"Auth\x01orization: Bearer {TOKEN}", f"Authorization: Bearer {TOKEN}{'x' * 9000}", f" Bearer {TOKEN}",
]  # fmt: skip


@pytest.mark.parametrize("line", SECRET_LINES, ids=lambda text: repr(text[:16]))
def test_what_the_parser_refuses_is_quoted_nowhere(
    server: ServedApplication, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    stream = io.StringIO()
    handler = LimitedHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        data = raw(server.port, f"GET /v1 HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode("latin-1"))
        chunked = "Transfer-Encoding: chunked\r\nConnection: close\r\n"
        head = f"POST {SAMPLES} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{chunked}\r\n"
        body = raw(server.port, f"{head}{TOKEN}\r\n".encode())
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    for answer in (parsed(data), parsed(body)):
        check_problem(answer, 400)
    status = exchange(server.port, "GET", "/v1/status", headers=AUTHORISED)
    for text in (data.decode("latin-1"), body.decode("latin-1"), stream.getvalue(), status.body.decode()):
        assert TOKEN not in text
    refused = [json.loads(one) for one in stream.getvalue().splitlines() if '"bad-http"' in one]
    assert refused and refused[0]["remote"] == "127.0.0.1" and refused[0]["error"]


@pytest.mark.parametrize(
    "data",
    [b"garbage\r\n\r\n", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
     b"POST /v1/extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"],
    ids=lambda d: repr(d[:16]),
)  # fmt: skip
def test_no_http_is_told_in_problem_details(server: ServedApplication, data: bytes) -> None:
    answer = parsed(raw(server.port, data))
    check_problem(answer, 400, "cannot be read")
    assert answer.headers["Server"] == "hapi"


def test_no_answer_tells_versions(server: ServedApplication, known: Known) -> None:
    for method, path, body in (
        ("GET", "/", None),
        ("GET", "/healthz", None),
        ("GET", "/nosuch", None),
        ("PUT", EXTRACT, None),
        ("POST", EXTRACT, known.extract()),
        ("POST", SAMPLES, {}),
    ):
        for headers in ({}, AUTHORISED):
            assert exchange(server.port, method, path, body, headers).headers["Server"] == "hapi"


def expecting(path: str, length: int, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", "Expect: 100-continue"]
    return "\r\n".join([*head, *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("path", "length", "lines", "status"),
    [
        (SAMPLES, 100, (), 401),
        ("/nosuch", 100, (), 401),
        ("/nosuch", 100, (f"Authorization: Bearer {TOKEN}",), 404),
        ("/v1/datasets", 100, (f"Authorization: Bearer {TOKEN}",), 405),
        (SAMPLES, 2 << 20, (), 401),
        (SAMPLES, 2 << 20, (f"Authorization: Bearer {TOKEN}",), 413),
    ],
)
def test_bodies_that_are_refused_are_not_asked_for(
    server: ServedApplication, path: str, length: int, lines: tuple[str, ...], status: int
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        sock.sendall(expecting(path, length, *lines))
        check_problem(parsed(sock.recv(65536)), status)


def test_a_body_that_is_wanted_is_asked_for(server: ServedApplication, known: Known) -> None:
    body = json.dumps(known.samples()).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        sock.sendall(expecting(SAMPLES, len(body), f"Authorization: Bearer {TOKEN}", "Connection: close"))
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        answer = parsed(b"".join(iter(lambda: sock.recv(65536), b"")))
        assert answer.status == 200 and answer.body[:4] == b"HAPF"


def test_other_expectations(server: ServedApplication) -> None:
    headers = {**AUTHORISED, "Expect": "cheese"}
    check_problem(exchange(server.port, "POST", SAMPLES, b"{}", headers), 417)
    check_problem(exchange(server.port, "POST", SAMPLES, b"{}", {"Expect": "cheese"}), 401)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost", None, 200),
        ("LOCALHOST:8099", None, 200),
        ("127.0.0.1:9999", "http://127.0.0.1:9999", 200),
        ("127.1.2.3", None, 200),
        ("[::1]:8099", "https://[::1]:8099", 200),
        ("localhost:9000", "http://localhost:9000", 200),
        ("evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("192.168.1.1", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("a b", None, 403),
        ("", None, 403),
        ("[::1", None, 403),
        ("localhost:9000", "http://localhost:9001", 403),
        ("localhost", "http://evil.example", 403),
        ("localhost", "null", 403),
    ],
)
def test_pages_from_elsewhere_cannot_ask(
    open_server: ServedApplication, server: ServedApplication, host: str, origin: str | None, status: int
) -> None:
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    for path in ("/v1/datasets", "/v1/status", "/metrics", "/"):
        answer = exchange(open_server.port, "GET", path, headers=headers)
        if status == 200:
            assert answer.status == 200
        else:
            check_problem(answer, 403, "token", "localhost")
    assert exchange(open_server.port, "GET", "/healthz", headers=headers).status == 200
    # A token is what no page from elsewhere has.
    assert exchange(server.port, "GET", "/v1/datasets", headers=headers | AUTHORISED).status == 200


def test_silent_connections_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 2.0)
    with served(folder, token=TOKEN) as small:
        silent = socket.create_connection(("127.0.0.1", small.port), timeout=240)
        dripping = socket.create_connection(("127.0.0.1", small.port), timeout=240)
        asking = socket.create_connection(("127.0.0.1", small.port), timeout=240)
        asking.sendall(request_bytes("/v1", b"", "GET", Authorization=f"Bearer {TOKEN}"))
        assert asking.recv(65536).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        dripping.sendall(b"GET /v1 HTTP/1.1\r\nX: ")
        dripping.settimeout(0.1)
        with pytest.raises(ConnectionError):
            while time.monotonic() < began + 240:
                try:
                    dripping.sendall(b"y")
                    if not dripping.recv(1):
                        raise ConnectionResetError
                except TimeoutError:
                    continue
        assert silent.recv(1) == b""
        asking.sendall(request_bytes("/v1", b"", "GET", Authorization=f"Bearer {TOKEN}"))
        assert asking.recv(65536).startswith(b"HTTP/1.1 200")
        assert small.application.connections.refused["late"] == 2
        for sock in (silent, dripping, asking):
            sock.close()


def test_health_beyond_the_limit(folder: Path) -> None:
    """Authorised connections keep all places; others may ask for the health, and are told to come back otherwise."""
    with served(folder, token=TOKEN, max_connections=3, max_connections_per_address=3) as small:
        held = [socket.create_connection(("127.0.0.1", small.port), timeout=240) for _ in range(3)]
        for sock in held:
            sock.sendall(request_bytes("/v1", b"", "GET", Authorization=f"Bearer {TOKEN}"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            assert exchange(small.port, "GET", "/healthz").status == 200
        answer = exchange(small.port, "GET", "/v1", headers=AUTHORISED)
        check_problem(answer, 503, "as many connections")
        assert answer.headers["Retry-After"] == "1" and answer.headers["Connection"] == "close"
        held.pop().close()
        until(lambda: small.application.connections.open == 2, 5, "the end of a connection")
        assert metric_of(small, 'hapi_connections_refused_total{reason="address"}') == 21
        for sock in held:
            sock.close()


def metric_of(server: ServedApplication, name: str) -> float:
    text = exchange(server.port, "GET", "/metrics", headers=AUTHORISED).body.decode()
    (line,) = (line for line in text.splitlines() if line.startswith(name + " "))
    return float(line.rsplit(" ", 1)[1])


def test_health_when_the_reserve_is_flooded(folder: Path) -> None:
    """Silent connections in the reserve make room for others."""
    with served(folder, max_connections=2, max_connections_per_address=2) as small:
        limits = small.application.connections.limits
        held = [socket.create_connection(("127.0.0.1", small.port), timeout=240) for _ in range(2)]
        for sock in held:
            sock.sendall(request_bytes("/v1", b"", "GET"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        crowd = []
        for _ in range(20):
            crowd += [socket.create_connection(("127.0.0.1", small.port), timeout=240) for _ in range(20)]
            assert exchange(small.port, "GET", "/healthz").status == 200
            assert small.application.connections.open <= limits.total + limits.reserve + 1
        for sock in crowd:  # at once, or after its second
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        held[0].sendall(request_bytes("/v1", b"", "GET"))
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")
        for sock in (*held, *crowd):
            sock.close()
        until(lambda: small.application.connections.open == 0, 5, "the end of the crowd")
        assert metric(small.port, "hapi_connections") == 1


def test_tls_handshakes_have_their_time_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no openssl to make a certificate: {error}")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 2.0)
    with served(folder, tls=tls, max_connections=4, max_connections_per_address=4) as small:
        silent = [socket.create_connection(("127.0.0.1", small.port), timeout=240) for _ in range(3)]
        until(lambda: small.application.connections.open == 3, 5, "their places")
        for sock in silent:
            assert sock.recv(1) == b""
            sock.close()
        until(lambda: small.application.connections.open == 0, 5, "the end of all")
        client = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        for _ in range(2):
            crowd = [socket.create_connection(("127.0.0.1", small.port), timeout=240) for _ in range(6)]
            with (
                socket.create_connection(("127.0.0.1", small.port), timeout=240) as plain,
                client.wrap_socket(plain, server_hostname="localhost") as sock,
            ):
                sock.sendall(request_bytes("/healthz", b"", "GET"))
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            for sock in crowd:
                sock.close()
        assert small.application.connections.refused["replaced"] >= 3
