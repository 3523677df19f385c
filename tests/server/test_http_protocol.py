"""What is no good HTTP, or good HTTP that means harm: bodies, paths, methods, headers, pipelines."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TENSORS,
    Answer,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    metric,
    raw,
    received,
    request_bytes,
    served,
    until,
)

from hapi.server.http import bodies


@pytest.fixture(autouse=True)
def lives_on(server: ServedApplication, known: Known) -> Iterator[None]:
    """After every test the server answers a good request with the right content."""
    yield
    known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
    server.idle()


def parsed(data: bytes) -> Answer:
    """The first answer of what came over a socket."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body[: int(headers.get("Content-Length", len(body)))])


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"{", b"[" * 200_000, b'{"a":' * 90_000, b"null", b"[]", b'"x"', b"NaN", b"9" * 10_000,
     b'{"ids": ' + b"9" * 5000 + b"}", b"\x00" * 1000, gzip.compress(b"{}", mtime=0)],
    ids=lambda b: repr(b[:12]),
)  # fmt: skip
@pytest.mark.parametrize("path", [EXTRACT, SAMPLES, TENSORS])
def test_bodies_that_are_no_requests(server: ServedApplication, path: str, body: bytes) -> None:
    check_problem(exchange(server.port, "POST", path, body), 400, "request")


def test_a_field_given_twice(server: ServedApplication, known: Known) -> None:
    body = json.dumps(known.samples()).encode()
    check_problem(exchange(server.port, "POST", SAMPLES, body[:-1] + b', "ids": [1]}'), 400, "ids")


@pytest.mark.slow
def test_bodies_are_not_inflated(server: ServedApplication, known: Known) -> None:
    bomb = gzip.compress(b" " * (64 << 20) + json.dumps(known.samples()).encode())
    answer = exchange(server.port, "POST", SAMPLES, bomb, {"Content-Encoding": "gzip"})
    check_problem(answer, 400, "JSON")


def test_announced_gigabyte_is_refused_at_once(server: ServedApplication) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        sock.sendall(
            f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n\r\n".encode()
        )
        check_problem(parsed(sock.recv(65536)), 413, "1048576")


def test_endless_chunks_are_cut_off(server: ServedApplication) -> None:
    """The answer comes after one mebibyte; what the client sends on is read and thrown away, then the line closes."""
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        sock.sendall(
            f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        sock.setblocking(False)
        answer = b""
        deadline = time.monotonic() + 240
        while not answer and time.monotonic() < deadline:
            try:
                sent += sock.send(chunk)
            except BlockingIOError:
                time.sleep(0.001)
            except ConnectionError:
                break
            with contextlib.suppress(BlockingIOError):
                answer = sock.recv(65536)
    check_problem(parsed(answer), 413, "1048576")
    assert sent < 64 << 20


@pytest.mark.parametrize(
    "chunk", [b"zz\r\n", b"-1\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nab", b"5\r\nabcdefgh\r\n"]
)
def test_broken_chunks(server: ServedApplication, chunk: bytes) -> None:
    head = f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    answer = raw(server.port, head + chunk, half_close=True)
    assert not answer or parsed(answer).status == 400
    assert b"Traceback" not in answer


def test_truncated_body(server: ServedApplication, known: Known) -> None:
    whole = request_bytes(EXTRACT, json.dumps(known.extract()).encode())
    for cut in (len(whole) - 1, len(whole) - 100, 60, 10, 1):
        answer = raw(server.port, whole[:cut], half_close=True)
        assert not answer or parsed(answer).status == 400


def test_slow_bodies_end(server: ServedApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        sock.sendall(f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode())
        answer = b""
        started = time.monotonic()
        sock.settimeout(0.1)
        while not answer and time.monotonic() - started < 240:
            sock.sendall(b" ")  # a byte now and then, for ever
            try:
                answer = sock.recv(65536)
            except TimeoutError:
                continue
        check_problem(parsed(answer), 400, "too long")
        assert time.monotonic() - started < 240


def test_many_slow_bodies_take_no_slot(server: ServedApplication, known: Known) -> None:
    """Connections that never finish their request do not keep others from being served."""
    heads = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for number, sock in enumerate(heads):
            line = f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            sock.sendall((line + ("\r\n{" if number % 2 else "")).encode())
        answer = exchange(server.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])
    finally:
        for sock in heads:
            sock.close()


def test_bodies_under_way_are_bounded(folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES", 3)
    with served(folder) as small:
        head = f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
        socks = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(3)]
        for sock in socks:
            sock.sendall(head)
        until(lambda: small.application.bodies.count == 3, 5, "three bodies under way")
        answer = exchange(small.port, "POST", EXTRACT, known.extract())
        check_problem(answer, 429)
        assert int(answer.headers["Retry-After"]) >= 1
        for sock in socks:
            sock.close()
        until(lambda: small.application.bodies.count == 0, 5, "the end of the bodies")
        assert exchange(small.port, "POST", EXTRACT, known.extract()).status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"])
def test_wrong_methods(server: ServedApplication, method: str) -> None:
    answer = exchange(server.port, method, EXTRACT)
    assert answer.status == 405
    assert answer.headers["Allow"] == "POST"
    if method != "HEAD":
        check_problem(answer, 405, "POST")


@pytest.mark.parametrize("path", ["/index.html", "/v2/extract", "/v1/extract/", "/v1//extract", "/v1/nosuch",
                                  "/favicon.ico", "/v1/datasets/", "/v1/datasets/a/b", "/v1/extract%00"])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_paths(server: ServedApplication, path: str, method: str) -> None:
    check_problem(exchange(server.port, method, path, b"{}" if method == "POST" else None), 404)


@pytest.mark.parametrize("kind", ["datasets", "models"])
@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%2fetc%2fpasswd",
     "digits%2f..%2fdigits", "digits%00", "%00", "%ff%fe", "%", "%zz", "digits%0a", ".hidden", "%5c..%5c", "a" * 129,
     "%2f", "%2f%2f", "digits%2fmanifest.json", "~root", "%F0%9F%92%A5", "digits%3fx=1", "C:"],
)  # fmt: skip
def test_path_tricks(server: ServedApplication, kind: str, name: str) -> None:
    answer = parsed(raw(server.port, request_bytes(f"/v1/{kind}/{name}", b"", "GET", Connection="close")))
    check_problem(answer, (400, 404))
    assert b"root:" not in answer.body


def test_documents(server: ServedApplication, known: Known) -> None:
    listed = exchange(server.port, "GET", "/v1/datasets").json()["datasets"]
    assert listed == [{"name": "digits", "version": known.dataset.version, "count": 40}]
    described = exchange(server.port, "GET", "/v1/datasets/digits").json()
    assert described["reference"] == known.dataset.reference.to_json()
    assert [m["name"] for m in exchange(server.port, "GET", "/v1/models").json()["models"]] == ["pushed"]
    check_problem(exchange(server.port, "GET", "/v1/datasets/nosuch"), 404, "nosuch", "/v1/datasets")
    check_problem(exchange(server.port, "GET", "/v1/models/nosuch"), 404, "nosuch", "/v1/models")


@pytest.mark.parametrize(
    "headers",
    [{"X-Long": "x" * 100_000}, {f"X-{n}": "y" for n in range(5000)}, {"X-Request-Id": "\"; rm -rf / \t" * 20},
     {"Authorization": "Bearer " + "\xff" * 100}, {"Content-Type": "text/plain; charset=nonsense"},
     {"Expect": "100-continue"}, {"Expect": "cheese"}, {"Upgrade": "h2c", "Connection": "Upgrade"},
     {"Upgrade": "websocket", "Connection": "Upgrade"},
     {"Content-Encoding": "br"}, {"Host": "a b"}, {"Range": "bytes=0-"}, {"Cookie": "=" * 4000}],
    ids=lambda h: next(iter(h.items()))[0] + next(iter(h.items()))[1][:12],
)  # fmt: skip
def test_absurd_headers(server: ServedApplication, known: Known, headers: dict[str, str]) -> None:
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    body = json.dumps(known.samples()).encode()
    head = f"POST {SAMPLES} HTTP/1.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{lines}\r\n"
    answer = raw(server.port, head.encode("latin-1") + body)
    assert b"Traceback" not in answer
    statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert not statuses or statuses[-1] in (200, 400, 403, 417, 431)


@pytest.mark.parametrize(
    "data",
    [b"garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xab" * 500, b"\x00" * 5000,
     b"GET / HTTP/9.9\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
     b"POST /v1/extract HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
     b"POST /v1/extract HTTP/1.1\r\nContent-Length: 5, 6\r\n\r\nabcdef",
     b"POST /v1/extract HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"POST /v1/extract HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
     b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nNo colon here\r\n\r\n", b"\n" * 100_000],
    ids=lambda d: repr(d[:24]),
)  # fmt: skip
def test_garbage_instead_of_http(server: ServedApplication, data: bytes) -> None:
    answer = raw(server.port, data, half_close=True)
    assert b"Traceback" not in answer
    assert not answer or 400 <= parsed(answer).status < 500


def test_http_1_0(server: ServedApplication, known: Known) -> None:
    body = json.dumps(known.samples()).encode()
    data = raw(server.port, f"POST {SAMPLES} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = parsed(data)
    assert answer.status == 200
    assert received(answer.body, 3)[0] == [5, 0, 5]


def test_pipelining_keeps_the_order(server: ServedApplication, known: Known) -> None:
    wanted = [[n, 39 - n] for n in range(20)]
    last = request_bytes("/healthz", b"", "GET", Connection="close")
    pipeline = b"".join(request_bytes(SAMPLES, json.dumps(known.samples(ids)).encode()) for ids in wanted)
    data = raw(server.port, pipeline + last)
    for ids in wanted:
        answer = parsed(data)
        assert answer.status == 200
        assert received(answer.body, 3)[0] == ids
        data = data[data.index(b"\r\n\r\n") + 4 + len(answer.body) :]
    assert parsed(data).json() == {"status": "alive"}


def test_a_bad_request_does_not_spoil_its_connection(server: ServedApplication, known: Known) -> None:
    good = request_bytes(SAMPLES, json.dumps(known.samples()).encode(), Connection="close")
    data = raw(server.port, request_bytes(EXTRACT, b"nonsense") + request_bytes("/nosuch", b"", "GET") + good)
    assert data.count(b"HTTP/1.1 ") == 3
    assert received(parsed(data[data.rindex(b"HTTP/1.1 ") :]).body, 3)[0] == [5, 0, 5]


@pytest.mark.slow
def test_readers_of_documents_that_never_read(folder: Path) -> None:
    """A pipeline of small requests whose answers nobody reads ends with the send timeout."""
    with served(folder, send_timeout=0.5) as small:
        sock = socket.create_connection(("127.0.0.1", small.port), timeout=1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = request_bytes("/metrics", b"", "GET")

        def pour() -> None:
            try:
                while True:
                    sock.sendall(request * 100)
            except OSError:
                pass

        pouring = threading.Thread(target=pour)
        pouring.start()
        pouring.join(240)
        assert not pouring.is_alive()  # the server closed the connection, or stopped reading
        until(lambda: metric(small.port, "hapi_cancelled_total") >= 1, 30, "the end of the connection")
        sock.close()


def test_the_log_shows_no_tracebacks(folder: Path, known: Known, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of this kind is an unexpected error to the server."""
    caplog.set_level("DEBUG")
    with served(folder) as fresh:
        for data in (
            b"garbage\r\n\r\n",
            b"POST /v1/extract HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            raw(fresh.port, data, half_close=True)
        exchange(fresh.port, "POST", EXTRACT, b"{}")
        exchange(fresh.port, "BREW", EXTRACT)
        exchange(fresh.port, "GET", "*")
    assert [r.getMessage() for r in caplog.records if r.exc_info and r.levelno > logging.DEBUG] == []
    bad = [vars(r) for r in caplog.records if vars(r).get("audit") == "bad-http"]
    assert [r["error"] for r in bad if r["error"]] and all(r["remote"] == "127.0.0.1" for r in bad)
