"""Documents are read from the newest of their copies, where a store compares them when it is asked to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hapi.errors import NotFoundError, StoreUnavailableError
from hapi.store.open import open_store

BODY = b"12345678"


class Copies:
    """A store with one object. It answers a comparison of all copies as :attr:`compares` says."""

    def __init__(self) -> None:
        self.compares = 200
        self.there = 200
        self.seen: list[tuple[str, bool]] = []
        """Method of each request, and whether it was about the newest copy."""
        copies = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                newest = self.headers.get("X-Newest") == "true"
                copies.seen.append((self.command, newest))
                status = copies.compares if newest else copies.there
                body = BODY if status == 200 else b""
                self.send_response(206 if status == 200 and self.headers.get("Range") else status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
                self.send_header("ETag", '"one"')
                if self.headers.get("Range"):
                    self.send_header("Content-Range", f"bytes 0-7/{len(BODY)}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    server = Copies()
    settings = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": server.url,
        "HAPI_STORE_RETRIES": "1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_documents_are_the_newest_and_ranges_any(copies: Copies) -> None:
    store = open_store("s3://bucket/deep")
    assert store.get("a") == BODY and store.exists("a") and store.size("a") == len(BODY) and store.mark("a")
    assert copies.seen == [("GET", True), ("HEAD", True), ("HEAD", True), ("HEAD", True)]
    copies.seen.clear()
    out = bytearray(8)
    store.read_into("a", 0, memoryview(out))
    assert out == BODY and copies.seen == [("GET", False)]


def test_any_copy_will_do_while_they_cannot_be_compared(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.compares = 503
    store = open_store("s3://bucket/deep")
    assert store.get("a") == BODY and store.exists("a")
    assert copies.seen == [("GET", True), ("GET", False), ("HEAD", False)], "one that hangs is awaited once"
    monkeypatch.setattr("hapi.store.remote._ANY_COPY_SECONDS", 0.0)
    copies.compares, copies.seen = 200, []
    again = open_store("s3://bucket/deep")
    assert again.get("a") == BODY and copies.seen == [("GET", True)]


def test_what_the_newest_copy_does_not_have_is_not_there(copies: Copies) -> None:
    """A node that was away still has what was removed meanwhile."""
    copies.compares = 404
    store = open_store("s3://bucket/deep")
    assert not store.exists("a")
    with pytest.raises(NotFoundError):
        store.get("a")
    assert all(newest for _, newest in copies.seen)


def test_a_store_that_is_down_is_asked_as_often_as_was_set(copies: Copies) -> None:
    copies.compares = copies.there = 503
    with pytest.raises(StoreUnavailableError, match=r"answered 503 \(2 times\)"):
        open_store("s3://bucket/deep").get("a")
    assert [newest for _, newest in copies.seen] == [True, False, False]


def test_a_store_without_older_copies_is_not_asked(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://newest")
    store.put("a", BODY)
    assert store.get("a") == BODY and store.size("a") == len(BODY) and not copies.seen
