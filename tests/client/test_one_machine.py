"""Servers on the trainer's own processors are recognised by what they tell, and nothing that they tell does harm."""

from __future__ import annotations

from typing import Any

import pytest

from hapi.client.connect import share_processors
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import TransportError
from hapi.process.machine_id import machine_id
from hapi.wire import messages
from hapi.wire.transport.urls import is_loopback


class Told:
    """A server that answers a question about its version with ``document``."""

    def __init__(self, document: Any, url: str) -> None:
        self.document, self.url, self.asked = document, url, 0

    def call(self, method: str, path: str, document: Any = None) -> Any:
        assert (method, path) == ("GET", messages.VERSION_PATH)
        self.asked += 1
        if isinstance(self.document, Exception):
            raise self.document
        return self.document

    def close(self) -> None:
        pass


def pool(*servers: Told) -> ServerPool:
    return ServerPool(list(servers))  # type: ignore[arg-type]


HERE = "http://127.0.0.1:8099"


def test_a_server_on_the_same_processors() -> None:
    document = {"machine": machine_id()}
    assert share_processors(pool(Told(document, HERE)))
    assert share_processors(pool(Told(document, HERE), Told(document, "http://[::1]:1")))
    assert not share_processors(pool(Told(document, HERE), Told({"machine": "0" * 32}, "http://[::1]:1")))


@pytest.mark.parametrize(
    "document",
    [
        {}, [], None, "x", {"machine": None}, {"machine": ""}, {"machine": [1]}, {"machine": "ab" * 16},
        {"machine": "x" * 10**6}, TransportError("gone"),
    ],
    ids=lambda document: repr(document)[:40],
)  # fmt: skip
def test_a_server_that_tells_nothing_or_nonsense_is_elsewhere(document: Any) -> None:
    assert not share_processors(pool(Told(document, HERE)))


def test_nothing_is_shared_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.client.connect.machine_id", lambda: "")
    assert not share_processors(pool(Told({"machine": ""}, HERE)))


def test_a_server_elsewhere_is_not_asked() -> None:
    server = Told({"machine": machine_id()}, "http://10.0.0.1:8099")
    assert not share_processors(pool(server)) and server.asked == 0


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost:1", True), ("https://127.9.9.9", True), ("http://[::1]:8099", True),
        ("http://127.0.0.1.example.org", False), ("http://10.0.0.1", False), ("loopback:", False), ("", False),
    ],
)  # fmt: skip
def test_urls_of_the_loopback(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback
