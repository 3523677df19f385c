"""One request of a transport is broken by another thread: it alone, at any time."""

from __future__ import annotations

import socket
import threading

import pytest
from support.threads import at_once
from support.tiny_http import answer, serving
from test_transport import END, read_end

from hapi.errors import HapiError, TransportError
from hapi.wire.transport.cancellation import Cancellation
from hapi.wire.transport.http import HttpTransport, LoopbackTransport


@pytest.mark.parametrize("begun", [False, True], ids=["before its head", "in its body"])
def test_a_request_under_way_is_broken(begun: bool) -> None:
    """And the server sees it; a request beside it ends well."""
    waits, seen, good = threading.Event(), threading.Event(), answer(END)

    def reply(connection: socket.socket, request: bytes) -> bool:
        if b"hang" not in request:
            return good(connection, request)
        if begun:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + END[:8])
        waits.set()
        if not connection.recv(1):
            seen.set()
        return False

    with serving(reply) as server:
        transport, cancellation = HttpTransport(server.url), Cancellation()

        def broken(number: int) -> None:
            if number:
                assert waits.wait(240)
                assert transport.stream("/v1/extract", {}, read_end).frames == 0
                cancellation.cancel()
            else:
                with pytest.raises(HapiError):
                    transport.stream("/v1/extract", {"hang": 1}, read_end, cancellation)

        at_once(2, broken)
        assert seen.wait(240)
        assert transport.stream("/v1/extract", {}, read_end).frames == 0
        transport.close()


def test_one_that_was_cancelled_is_not_sent() -> None:
    with serving(answer(END)) as server:
        cancellation = Cancellation()
        cancellation.cancel()
        transport = HttpTransport(server.url)
        with pytest.raises(TransportError, match="cancelled"):
            transport.stream("/v1/extract", {}, read_end, cancellation)
        assert not server.requests
        transport.close()


def test_the_next_request_on_its_connection_is_not_broken() -> None:
    with serving(answer(END)) as server:
        cancellation = Cancellation()
        transport = HttpTransport(server.url)
        transport.stream("/v1/extract", {}, read_end, cancellation)
        cancellation.cancel()
        transport.stream("/v1/extract", {}, read_end)
        assert server.connections == 1
        transport.close()


def test_without_a_network_it_ends_at_the_next_buffer() -> None:
    cancellation = Cancellation()
    transport = LoopbackTransport(lambda *_: (200, {}, iter([END])))
    cancellation.cancel()
    with pytest.raises(TransportError, match="cancelled"):
        transport.stream("/v1/extract", {}, read_end, cancellation)
