"""aiohttp's service of the application, with places for connections and our own answers to malformed HTTP.

The parser's own messages quote the bytes that it could not read, a header with a token among them. Answers
and the log get only the name of the error's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from hapi.errors import BadRequestError
from hapi.server.http.connections import Connections, OpenConnection
from hapi.server.http.keys import trace_of
from hapi.server.http.problems import SERVER_NAME, as_hapi_error, problem_response
from hapi.server.lifecycle import audit
from hapi.wire.messages import TRACE_HEADER

log = logging.getLogger("hapi.server")

KEEP_ALIVE_SECONDS = 75.0
"""Longest idle time of a connection between two requests, in seconds."""
READ_BYTES = 32 << 10
"""Bytes for which there must be memory before any request is read: asyncio's 256 KiB are the first not to be had."""
EXPECT = web.RequestKey("expect", str)
"""Header with the request's condition before it sends its body; aiohttp would answer before authorisation."""
_SERVED: Mapping[str, Any] = {
    "access_log": None,
    "keepalive_timeout": KEEP_ALIVE_SECONDS,
    "auto_decompress": False,  # a few bytes could grow to megabytes; no client compresses its requests
}


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection, which knows its place.

    Where the library fails, as without memory it may anywhere, it would leave the connection open, and nobody would
    ever answer: it is closed instead.
    """

    __slots__ = ("connection",)

    connection: OpenConnection | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find the place that its socket was given when it was accepted; foreign sockets have none."""
        sock = transport.get_extra_info("socket")
        server = self._manager
        self.connection = (
            server.client_connections.connection_of(sock.fileno())
            if sock and isinstance(server, WebServer)
            else None
        )
        if self.connection is not None and isinstance(transport, asyncio.WriteTransport):
            self.connection.abort = transport.abort
        try:
            super().connection_made(transport)
            if hasattr(transport, "max_size"):
                transport.max_size = READ_BYTES
            if isinstance(transport, asyncio.ReadTransport) and not transport.get_extra_info("sslcontext"):
                # asyncio begins to read after this, where a failure would leave a connection that nobody reads.
                transport.pause_reading()
                transport.resume_reading()
        except BaseException:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
            raise

    def data_received(self, data: bytes) -> None:
        """Take in what has come."""
        try:
            super().data_received(data)
        except BaseException:
            self._abort()
            raise

    async def start(self) -> None:
        """Serve requests until the connection is closed."""
        try:
            await super().start()
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with problem details to a request that the parser refuses, without its message."""
        if isinstance(exc, HttpProcessingError):
            kind = type(exc).__name__
            audit.refused("bad-http", error=kind, remote=request.remote)
            what = (
                "a line or header is too long"
                if isinstance(exc, LineTooLong)
                else "no HTTP/1.1 as expected here"
            )
            problem = as_hapi_error(BadRequestError(f"the request cannot be read: {what} ({kind})"))
        else:
            problem = as_hapi_error(exc if isinstance(exc, Exception) else RuntimeError(f"status {status}"))
            log.error("unexpected error in the HTTP library", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer was sent already")
        response = problem_response(problem)
        response.force_close()
        return response


class WebServer(web.Server):
    """aiohttp's server of an application, with :class:`Connection` for each connection."""

    def __init__(self, made: web.Server, connections: Connections) -> None:
        super().__init__(
            made.request_handler,
            request_factory=self._request,
            handler_cancellation=made.handler_cancellation,
            **_SERVED,
        )
        self.client_connections = connections
        self._application_request = made.request_factory

    def __call__(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self, loop=asyncio.get_running_loop(), **_SERVED)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        """The request of a head that has come."""
        if isinstance(protocol, Connection) and protocol.connection is not None:
            self.client_connections.asks(protocol.connection)
        expect = message.headers.get(hdrs.EXPECT)
        if expect:
            headers = CIMultiDict(message.headers)
            headers.popall(hdrs.EXPECT)
            message = message._replace(headers=CIMultiDictProxy(headers))
        request = self._application_request(message, payload, protocol, writer, task)
        if expect:
            request[EXPECT] = expect
        return request


class WebRunner(web.AppRunner):
    """Runs an application behind a :class:`WebServer`."""

    def __init__(self, application: web.Application, connections: Connections) -> None:
        # Handlers are cancelled when their client leaves.
        super().__init__(application, handler_cancellation=True, shutdown_timeout=1.0, **_SERVED)
        self._connections = connections
        self._watch: asyncio.Task[None] | None = None
        application.on_response_prepare.append(_own_headers)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        self._watch = asyncio.create_task(self._connections.watch())
        return WebServer(made, self._connections)

    async def _cleanup_server(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await super()._cleanup_server()


async def _own_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """No versions in the header ``Server``; the client's trace as it came."""
    response.headers[hdrs.SERVER] = SERVER_NAME
    if trace := trace_of(request):
        response.headers[TRACE_HEADER] = trace


def connection_of(request: web.BaseRequest) -> OpenConnection | None:
    """The place of the connection that a request came by."""
    return request.protocol.connection if isinstance(request.protocol, Connection) else None
