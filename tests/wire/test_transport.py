"""The transport over real sockets: reuse, broken and hostile answers, TLS, closing; one clear error each."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.certificates import make_certificate
from support.threads import at_once
from support.tiny_http import answer, raw, serving, tls_server

from hapi.errors import (
    BadRequestError,
    BusyError,
    DeadlineError,
    ForeignAnswerError,
    HapiError,
    NotFoundError,
    TooLargeError,
    TransportError,
    UnauthorizedError,
    UsageError,
    WireError,
)
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import StreamEnd, end_frame
from hapi.wire.transport import answers
from hapi.wire.transport.http import HttpTransport

END = bytes(end_frame(StreamEnd(0, 0, {})))


def read_end(reader: FrameReader) -> StreamEnd:
    end = reader.next(lambda header: [])
    assert isinstance(end, StreamEnd)
    return end


def refusal(transport: HttpTransport, kind: type[HapiError], match: str, stream: bool = False) -> HapiError:
    """The error of one request: of this kind, matching, on one line that a terminal can show."""
    with pytest.raises(kind, match=match) as caught:
        if stream:
            transport.stream("/v1/extract", {}, read_end)
        else:
            transport.call("GET", "/v1/datasets")
    assert str(caught.value).isprintable()
    return caught.value


# -- connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["documents", "frames"])
def test_a_connection_is_used_again(stream: bool) -> None:
    with serving(answer(END if stream else b"{}")) as server:
        transport = HttpTransport(server.url)
        for _ in range(5):
            if stream:
                assert transport.stream("/v1/extract", {"x": 1}, read_end).frames == 0
            else:
                assert transport.call("GET", "/v1") == {}
        assert (server.connections, len(server.requests)) == (1, 5)
        transport.close()


def connections_of(requests: int, answer: bytes) -> int:
    """Connections that so many requests take, each of which is answered with these bytes."""
    with serving(raw(answer, keep=True)) as server:
        transport = HttpTransport(server.url)
        for _ in range(requests):
            transport.stream("/v1/extract", {}, read_end)
        return server.connections


def test_chunked_answers_keep_the_connection() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(END), END)
    assert connections_of(3, chunked) == 1


def test_stale_connections_are_replaced_without_a_failure() -> None:
    with serving(answer(b"{}")) as server:
        transport = HttpTransport(server.url)
        barrier = threading.Barrier(3)

        def ask() -> None:
            barrier.wait()
            transport.call("GET", "/v1")

        at_once(3, lambda _: ask())
        server.hang_up()
        time.sleep(0.05)
        before = server.connections
        assert transport.call("GET", "/v1") == {}
        assert server.connections == before + 1


def test_an_answer_that_ends_with_its_connection_is_not_reused() -> None:
    with serving(answer(b"{}", "200 OK", "Connection: close", keep=False)) as server:
        transport = HttpTransport(server.url)
        assert [transport.call("GET", "/v1") for _ in range(2)] == [{}, {}]
        assert server.connections == 2


def test_what_comes_by_connections_that_end_is_counted() -> None:
    body = json.dumps("x" * 5000).encode()
    with serving(answer(body, "200 OK", "Connection: close", keep=False)) as server:
        transport = HttpTransport(server.url)
        if transport.received_bytes() is None:
            pytest.skip("this system does not tell what a connection has received")
        for n in range(1, 4):
            transport.call("GET", "/v1")
            assert n * len(body) < (transport.received_bytes() or 0) < n * (len(body) + 500)


def test_an_answer_that_would_end_its_connection_can_be_interrupted() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
    with serving(raw(head, keep=True)) as server:
        transport = HttpTransport(server.url, timeout=3600)
        thread, failures = _calling(transport)
        while not transport.received_bytes():
            time.sleep(0.005)
        time.sleep(0.05)
        transport.interrupt()
        thread.join(240)
        assert not thread.is_alive() and isinstance(failures[0], TransportError)


def test_bytes_after_the_end_frame_are_not_read() -> None:
    """Neither into memory, nor as the next request's answer."""
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n" + END + b"x" * 100_000
    assert connections_of(2, endless) == 2


def test_close_breaks_a_blocked_read_and_refuses_what_follows() -> None:
    with serving(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", keep=True)) as server:
        transport = HttpTransport(server.url, timeout=3600)
        thread, failures = _calling(transport)
        while not server.requests:
            time.sleep(0.005)
        time.sleep(0.05)
        transport.close()
        transport.close()
        thread.join(240)
        assert not thread.is_alive()
        assert isinstance(failures[0], TransportError)
        assert isinstance(_error(transport), TransportError)


def test_interrupt_breaks_what_is_under_way_only() -> None:
    with serving(raw(b"", keep=True)) as server:
        transport = HttpTransport(server.url, timeout=3600)
        thread, failures = _calling(transport)
        while not server.requests:
            time.sleep(0.005)
        transport.interrupt()
        thread.join(240)
        assert isinstance(failures[0], TransportError)
        server.reply = answer(b"{}")
        assert transport.call("GET", "/v1") == {}


def _calling(transport: HttpTransport) -> tuple[threading.Thread, list[HapiError]]:
    """A thread with one request, and where its error will be."""
    failures: list[HapiError] = []
    thread = threading.Thread(target=lambda: failures.append(_error(transport)))
    thread.start()
    return thread, failures


def _error(transport: HttpTransport) -> HapiError:
    try:
        transport.call("GET", "/v1")
    except HapiError as error:
        return error
    raise AssertionError("the request went through")


# -- answers -----------------------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        error = refusal(
            HttpTransport(f"http://127.0.0.1:{port}"), TransportError, f"{port}/v1/datasets.*refused"
        )
    assert "is the server running" in str(error)


def test_silence_ends_with_the_timeout() -> None:
    with serving(raw(b"", keep=True)) as server:
        started = time.monotonic()
        refusal(HttpTransport(server.url, timeout=0.2), TransportError, "no answer in time")
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + END[:700],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2bc\r\n" + END[:700] + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"",
    ],
    ids=["counted", "chunked", "bad chunk", "head", "nothing"],
)
def test_a_connection_that_breaks_in_the_middle(data: bytes, stream: bool) -> None:
    with serving(raw(data)) as server:
        with pytest.raises((TransportError, WireError)) as caught:
            if stream:
                HttpTransport(server.url, timeout=240).stream("/v1/extract", {}, read_end)
            else:
                HttpTransport(server.url, timeout=240).call("GET", "/v1")
        assert str(caught.value).isprintable()
        assert caught.value.retryable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 \x1b[31mOK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000 + b"\r\n\r\n",
        b"\x00" * 100,
    ],
    ids=["ssh", "status", "headers", "long header", "zeros"],
)
def test_what_is_no_http_is_a_bad_answer(data: bytes) -> None:
    with serving(raw(data)) as server:
        refusal(HttpTransport(server.url, timeout=240), WireError, "does not speak HTTP.*hapi-server")


@pytest.mark.parametrize("body", [b"<html>hello", b"", b'{"a":', b"[" * 100_000, b"\xff\xfe{}"])
def test_answers_that_are_no_json(body: bytes) -> None:
    with serving(answer(body)) as server:
        refusal(
            HttpTransport(server.url), BadRequestError, f"{server.port}/v1/datasets.*is this a hapi-server"
        )


def test_huge_documents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_DOCUMENT_BYTES", 1000)
    with serving(answer(b'"' + b"x" * 2000 + b'"')) as server:
        refusal(HttpTransport(server.url), BadRequestError, "longer than 1000 bytes")


def test_redirects_are_told_not_followed() -> None:
    with (
        serving(answer(b"{}")) as target,
        serving(answer(b"", "302 Found", f"Location: {target.url}/\x1b[2J")) as server,
    ):
        refusal(HttpTransport(server.url), UsageError, f"redirected to {target.url}.*not followed")
        assert not target.requests


def problem(slug: str, status: int, detail: str, **more: Any) -> bytes:
    document = {"type": f"urn:hapi:problem:{slug}", "title": "x", "status": status, "detail": detail, **more}
    return json.dumps(document).encode()


def test_problem_details_become_their_error() -> None:
    with serving(answer(problem("not-found", 404, "there is no dataset 'x'"), "404 Not Found")) as server:
        error = refusal(HttpTransport(server.url), NotFoundError, r"no dataset 'x' \(request [0-9a-f]{16}\)")
        request_id = str(error).rsplit(" ", 1)[1].rstrip(")")
        assert f"X-Request-Id: {request_id}".encode().lower() in server.requests[0].lower()


def test_messages_cannot_steer_the_terminal() -> None:
    with serving(
        answer(problem("not-found", 404, "\x1b[2Jgone\x07\r\nfine \u202e"), "404 Not Found")
    ) as server:
        refusal(HttpTransport(server.url), NotFoundError, "gone")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("401 Unauthorized", UnauthorizedError), ("404 Not Found", ForeignAnswerError), ("413 Large", TooLargeError),
        ("502 Bad Gateway", TransportError), ("503 Service Unavailable", TransportError),
        ("504 Gateway Timeout", TransportError), ("500 Worker Limit", TransportError), ("418 No", ForeignAnswerError),
        ("408 Request Time-out", TransportError),
    ],
)  # fmt: skip
def test_other_servers_errors_name_the_url(status: str, kind: type[HapiError]) -> None:
    with serving(answer(b"<html>no</html>", status)) as server:
        refusal(
            HttpTransport(server.url), kind, f"{server.port}/v1/datasets: answered {status[:3]}.*hapi-server"
        )


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b'{"type": 3, "detail": {}, "retry_after": "x"}', b"{" * 100_000, b"x" * 100_000]
)
def test_problems_of_any_form(body: bytes) -> None:
    with serving(answer(body, "429 Too Many", "Retry-After: 7")) as server:
        assert refusal(HttpTransport(server.url), BusyError, "answered 429").retry_after == 7


@pytest.mark.parametrize("text", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1e9", "99999999999999"])
def test_other_retry_after_headers_are_ignored(text: str) -> None:
    with serving(answer(problem("busy", 429, "full"), "429 Too Many", f"Retry-After: {text}")) as server:
        assert refusal(HttpTransport(server.url), BusyError, "full").retry_after is None


@pytest.mark.parametrize(("timeout", "seconds"), [(60.0, "54.000"), (5.0, "4.500"), (1e9, "86400.000")])
def test_the_queue_must_be_shorter_than_the_longest_silence(timeout: float, seconds: str) -> None:
    with serving(answer(b"{}")) as server:
        HttpTransport(server.url, timeout=timeout).call("GET", "/v1")
        assert f"X-Deadline-Seconds: {seconds}\r\n".encode() in server.requests[0]


def test_what_a_refusal_says_of_waiting() -> None:
    body = problem("deadline", 504, "it waited until its deadline", retry_after=2.5, expected_wait=7.25)
    with serving(answer(body, "504 Gateway Timeout", "Retry-After: 3")) as server:
        error = refusal(HttpTransport(server.url), DeadlineError, "until its deadline")
        assert (error.retry_after, error.expected_wait) == (2.5, 7.25)


def test_the_token_is_sent() -> None:
    with serving(answer(b"{}")) as server:
        HttpTransport(server.url, token="secret").call("GET", "/v1")
        assert b"Authorization: Bearer secret\r\n" in server.requests[0]


def test_a_path_in_the_url_comes_first() -> None:
    with serving(answer(b"{}")) as server:
        HttpTransport(server.url + "/hapi/").call("GET", "/v1/datasets/a b")
        assert server.requests[0].startswith(b"GET /hapi/v1/datasets/a%20b HTTP/1.1")


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "ftp://x", "http://", "http://:80", "http://x:0", "http://x:99999", "http://x:y", "http://[::1", "//x",
        "http://a..b", "http://h/ä", "http://ä.x/", "http://x/a b", "http://x/\r\nHost: y", "http://x?q=1", "http://x/#f",
        "http://" + "a" * 70, "127.0.0.1:80", "http://x\x00",
    ],
)  # fmt: skip
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError, match=r"server URL .*expected http://HOST:PORT") as caught:
        HttpTransport(url)
    assert "\n" not in str(caught.value)


def test_passwords_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="no user or password") as caught:
        HttpTransport("http://me:secret@host:80")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ümlaut", "\udcff", "a\x00"])
def test_bad_tokens(token: str) -> None:
    with pytest.raises(UsageError, match="token") as caught:
        HttpTransport("http://x", token=token)
    assert token not in str(caught.value)


# -- TLS ---------------------------------------------------------------------------------------------------------


def test_https_with_its_authority(certificate: Path) -> None:
    with serving(answer(b"{}"), tls_server(certificate)) as server:
        transport = HttpTransport(server.url, ca_file=str(certificate))
        assert [transport.call("GET", "/v1") for _ in range(2)] == [{}, {}]
        assert server.connections == 1


def test_https_with_a_certificate_that_nobody_vouches_for(certificate: Path) -> None:
    with serving(answer(b"{}"), tls_server(certificate)) as server:
        error = refusal(HttpTransport(server.url), UsageError, "certificate is not trusted.*--ca-file")
        assert not error.retryable
        assert not server.requests


def test_https_with_a_certificate_for_another_name(certificate: Path) -> None:
    with serving(answer(b"{}"), tls_server(certificate)) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        refusal(HttpTransport(url, ca_file=str(certificate)), UsageError, "for another name than 'localhost'")


@pytest.mark.slow_except("days0-has expired.*clock")
@pytest.mark.parametrize(
    ("days", "match"), [((-3, -1), "has expired.*clock"), ((2, 3), "not valid yet.*clocks")]
)
def test_https_with_a_certificate_of_another_time(days: tuple[int, int], match: str, tmp_path: Path) -> None:
    both = make_certificate(tmp_path, *days)
    with serving(answer(b"{}"), tls_server(both)) as server:
        refusal(HttpTransport(server.url, ca_file=str(both)), UsageError, match)


def test_too_many_open_files_here_are_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where the socket is made and where it gets a second handle."""
    for name in ("socket.create_connection", "os.dup"):
        with serving(answer(b"{}")) as server, monkeypatch.context() as patch:
            patch.setattr(name, failing_with(errno.EMFILE))
            error = refusal(
                HttpTransport(server.url), TransportError, r"too many files.*on this side.*ulimit -n"
            )
            assert "running" not in str(error)


def failing_with(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_https_to_a_plain_server_and_back(certificate: Path) -> None:
    with serving(raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as server:
        refusal(HttpTransport(server.url.replace("http", "https"), timeout=240), UsageError, "speaks no TLS")
    with serving(answer(b"{}"), tls_server(certificate)) as server:
        http = server.url.replace("https", "http")
        refusal(HttpTransport(http, timeout=240), UsageError, "speaks TLS there; write https://")
    with serving(raw(b"\x15\x03\x03\x00\x02\x02\x0a")) as server:
        refusal(HttpTransport(server.url), UsageError, "speaks TLS there; write https://")
    with serving(raw(b"")) as server:  # breaks off, and speaks no TLS either
        refusal(HttpTransport(server.url, timeout=240), TransportError, "is the server running")


def test_close_breaks_a_blocked_read_over_tls(certificate: Path) -> None:
    with serving(
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", keep=True), tls_server(certificate)
    ) as server:
        transport = HttpTransport(server.url, ca_file=str(certificate), timeout=3600)
        thread = threading.Thread(target=lambda: _error(transport))
        thread.start()
        while not server.requests:
            time.sleep(0.005)
        time.sleep(0.1)
        transport.close()
        thread.join(240)
        assert not thread.is_alive()


@pytest.mark.parametrize("content", [None, "", "not a certificate"])
def test_bad_ca_files(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=f"--ca-file {path}: http://x:1 is not an https:// server"):
        HttpTransport("http://x:1", ca_file=str(path))  # the token would travel in the clear
    with pytest.raises(UsageError, match=f"--ca-file {path}: cannot be read") as caught:
        HttpTransport("https://x", ca_file=str(path))
    assert str(caught.value).isprintable()
