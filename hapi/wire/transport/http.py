"""Two ways to a server: :class:`HttpTransport` over sockets, and :class:`LoopbackTransport`, which calls a handler
in the same process, so that a whole split training runs in a test without a port. Errors of sockets and of HTTP become
:mod:`hapi.errors` here and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import quote

from hapi.errors import HapiError, TransportError, UsageError, from_problem
from hapi.trace import TRACE_PARENT
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import VERSION_HEADER, WIRE_VERSION, Buffer, FrameLimits
from hapi.wire.messages import (
    CODE_HEADER,
    DEADLINE_HEADER,
    MAX_DEADLINE,
    REQUEST_ID_HEADER,
    TRACE_HEADER,
)
from hapi.wire.transport.answers import (
    check_plain,
    check_range,
    parsed_answer,
    read_document,
    receive_into,
    refusal,
)
from hapi.wire.transport.cancellation import Cancellation
from hapi.wire.transport.failures import connection_error
from hapi.wire.transport.low_water import LowWaterResponse
from hapi.wire.transport.slow_server import AnswerLimits
from hapi.wire.transport.sockets import received_bytes, shut
from hapi.wire.transport.urls import bearer, parse_url, tls_context

T = TypeVar("T")
_JSON, _READS = {"Content-Type": "application/json"}, {VERSION_HEADER: str(WIRE_VERSION)}
"""Headers of all requests, and of those for frames."""
QUEUE_SHARE = 0.9
"""Part of the longest silence that a request may spend in a server's queue, so that the server says so before it counts
as dead."""
CONNECT_SECONDS = 10.0
"""Longest time until a connection stands, TLS included; a network that swallows packets never says no."""


class HttpTransport:
    """HTTP/1.1 with kept-alive connections, one per request under way. Thread-safe.

    ``timeout`` is the longest silence, in seconds, before a server counts as dead; ``answer_limits`` bound it beyond.
    ``stream_headers`` gives further headers of a request for a stream. ``address``, of those of the URL's name, is
    connected to and named in messages; HTTP and TLS see the name. ``tls`` takes the place of trust in ``ca_file``.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        timeout: float = 60.0,
        limits: FrameLimits | None = None,
        answer_limits: AnswerLimits | None = None,
        stream_headers: Callable[[], Mapping[str, str]] = dict,
        address: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address, self._connect_to = parse_url(url), address
        self.url = url.rstrip("/") if address is None else self._address.at(address)
        if ca_file is not None and self._address.scheme != "https":
            raise UsageError(
                f"--ca-file {ca_file}: {url} is not an https:// server, so nothing would be encrypted or "
                "checked; write https://, or leave --ca-file away"
            )
        self._tls = (tls or tls_context(ca_file)) if self._address.scheme == "https" else None
        deadline = min(timeout * QUEUE_SHARE, MAX_DEADLINE)
        self._headers = {**bearer(token), DEADLINE_HEADER: f"{max(deadline, 0.001):.3f}"}
        self._timeout = timeout
        self._limits = limits
        self._stream_headers = stream_headers
        self._response = partial(
            LowWaterResponse, limits=replace(answer_limits or AnswerLimits(), silence=timeout)
        )
        self._spoken = False
        """True when something there has answered in HTTP."""
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._active: set[http.client.HTTPConnection] = set()
        self._sockets: dict[http.client.HTTPConnection, socket.socket] = {}
        """Own handles of all connections: http.client drops its own when an answer will close it."""
        self._closed = False
        self._received_before = 0
        """Bytes received by connections that are closed."""

    def use_token(self, token: str | None) -> None:
        """Send ``token`` with all requests from now on; None: none."""
        self._headers = {**bearer(token), DEADLINE_HEADER: self._headers[DEADLINE_HEADER]}

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request over a kept connection; see :meth:`~hapi.wire.transport.base.Transport.call`."""
        with self._exchange(method, path, document) as response:
            response.guard.document()
            return read_document(response, self.url + path)

    def stream(
        self,
        path: str,
        document: Any,
        receive: Callable[[FrameReader], T],
        cancellation: Cancellation | None = None,
    ) -> T:
        """POST ``document`` over a kept connection; see :meth:`~hapi.wire.transport.base.Transport.stream`."""
        headers = {**_READS, **self._stream_headers()}
        with self._exchange("POST", path, document, headers=headers, cancellation=cancellation) as response:
            guard = response.guard
            reader = FrameReader(response, self._limits, guard.arriving, response.headers.get(CODE_HEADER))
            guard.frames(lambda: reader.bytes_read)
            result = receive(reader)
            # The end of a chunked body must be read before the connection can be used again. Whatever else comes
            # is nobody's: the answer is not closed then, and the connection is given up.
            guard.end()
            with contextlib.suppress(OSError, http.client.HTTPException):
                response.read(1)
            return result

    def read_range(
        self,
        path: str,
        start: int,
        out: Sequence[memoryview],
        headers: Mapping[str, str] | None = None,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """GET a range of bytes, received straight into buffers.

        Args:
            path: on the server, of a resource with ranges such as ``/v1/packs/ID``.
            start: first byte.
            out: buffers that are filled one after the other, with all bytes from ``start`` on; at least one byte.
            headers: further headers of the request.
            then: called with the number of each buffer once it is full, while the next bytes are on their way.

        Raises:
            HapiError: the error that the server sent, or :class:`TransportError`; bytes may have come into ``out``.
        """
        stop = start + sum(part.nbytes for part in out)
        ranged = {"Range": f"bytes={start}-{stop - 1}", **(headers or {})}
        with self._exchange("GET", path, None, headers=ranged, status=206) as response:
            check_range(response, start, stop, self.url + path)
            response.guard.document()
            for number, part in enumerate(out):
                receive_into(response, part)
                if then is not None:
                    then(number)

    def received_bytes(self) -> int | None:
        """Return the kernel's count of bytes on all connections; None where it does not tell."""
        with self._lock:
            counts = [received_bytes(sock) for sock in self._sockets.values()]
            known = [count for count in counts if count is not None]
            return self._received_before + sum(known) if len(known) == len(counts) else None

    def interrupt(self) -> None:
        """Shut the sockets of all requests under way."""
        with self._lock:
            for connection in self._active:
                shut(self._sockets.get(connection))

    def close(self) -> None:
        """End all connections, also those that are in use: their requests fail at once."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
            for connection in self._active:
                shut(self._sockets.get(connection))
        for connection in idle:
            self._break(connection)

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        document: Any,
        *,
        headers: Mapping[str, str] | None = None,
        status: int = 200,
        cancellation: Cancellation | None = None,
    ) -> Iterator[LowWaterResponse]:
        """One request; the connection goes back to the idle ones only after a whole, good answer."""
        request_id = uuid.uuid4().hex[:16]
        connection: http.client.HTTPConnection | None = None
        whole = False
        try:
            own = {**self._headers, **(headers or {}), REQUEST_ID_HEADER: request_id}
            if parent := TRACE_PARENT.get():
                own[TRACE_HEADER] = parent
            connection, response = self._send(method, path, document, own, cancellation)
            self._spoken = True
            if response.status != status:
                response.guard.document()
                raise refusal(response, self.url + path)
            check_plain(response, self.url + path)
            yield response
            whole = response.isclosed() and not response.will_close
        except HapiError as error:  # also an error frame, and a frame that is broken
            error.about_request(request_id)
            raise
        except (OSError, http.client.HTTPException) as error:
            problem = connection_error(error, self.url + path, self._address, new=not self._spoken)
            problem.about_request(request_id)
            raise problem from error
        finally:
            if cancellation is not None:
                cancellation.over()
            if connection is not None:
                self._settle(connection, reusable=whole)

    def _send(
        self,
        method: str,
        path: str,
        document: Any,
        headers: Mapping[str, str],
        cancellation: Cancellation | None,
    ) -> tuple[http.client.HTTPConnection, LowWaterResponse]:
        body = None if document is None else json.dumps(document, separators=(",", ":")).encode()
        while True:
            connection, reused = self._connection()
            try:
                if not reused:
                    self._connect(connection)
                if cancellation is not None:
                    cancellation.begin(partial(shut, self._sockets.get(connection)))
                connection.request(method, self._address.base + quote(path), body, {**headers, **_JSON})
                return connection, cast(LowWaterResponse, connection.getresponse())
            except BaseException as error:
                self._settle(connection, reusable=False)
                # A kept-alive connection may have been closed meanwhile; in the end there is a fresh one.
                if not reused or not isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                    raise

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._closed:
                raise TransportError(f"{self.url}: the transport was closed")
            if self._idle:
                connection = self._idle.pop()
                self._active.add(connection)
                return connection, True
            connection = self._fresh()
            self._active.add(connection)
            return connection, False

    def _fresh(self) -> http.client.HTTPConnection:
        host, port, seconds = self._address.host, self._address.port, min(self._timeout, CONNECT_SECONDS)
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        connection.response_class = self._response  # type: ignore[assignment]
        if (address := self._connect_to) is not None:
            connection._create_connection = lambda _, *how: socket.create_connection((address, port), *how)  # type: ignore[attr-defined]
        return connection

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        connection.connect()
        connection.sock.settimeout(self._timeout)
        # A plain socket's also under TLS, whose own shutdown would wait for the thread that is reading.
        own = socket.socket(fileno=os.dup(connection.sock.fileno()))
        with self._lock:
            self._sockets[connection] = own
            if self._closed:  # while there was no socket yet that close() could have broken
                raise TransportError(f"{self.url}: the transport was closed")

    def _settle(self, connection: http.client.HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            self._active.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
                return
        self._break(connection)

    def _break(self, connection: http.client.HTTPConnection) -> None:
        """Close at once, whatever was under way."""
        with self._lock:
            sock = self._sockets.pop(connection, None)
            if sock is not None:
                self._received_before += received_bytes(sock) or 0
        shut(sock)
        with contextlib.suppress(OSError):
            connection.close()
        if sock is not None:
            sock.close()


Handler = Callable[[str, str, bytes], tuple[int, Mapping[str, str], Iterator[Buffer]]]
"""(method, path, body) to (status, headers, body buffers): a server without its sockets."""


class LoopbackTransport:
    """Calls a server's handler in this process: the same documents and frames, no socket."""

    def __init__(self, handler: Handler, url: str = "loopback:") -> None:
        self.url = url
        self._handler = handler
        self._closed = False

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Call the handler, and parse its JSON answer."""
        status, _, buffers = self._exchange(method, path, document)
        body = b"".join(bytes(b) for b in buffers)
        if status != 200:
            raise from_problem(parsed_answer(body, self.url), status)
        return parsed_answer(body, self.url)

    def stream(
        self,
        path: str,
        document: Any,
        receive: Callable[[FrameReader], T],
        cancellation: Cancellation | None = None,
    ) -> T:
        """Call the handler, and give its frames to ``receive``."""
        status, headers, buffers = self._exchange("POST", path, document)
        if status != 200:
            raise from_problem(parsed_answer(b"".join(bytes(b) for b in buffers), self.url), status)
        buffers = buffers if cancellation is None else cancellation.until(buffers)
        return receive(FrameReader(BufferSource(buffers), code=headers.get(CODE_HEADER)))

    def _exchange(
        self, method: str, path: str, document: Any
    ) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        if self._closed:
            raise TransportError(f"{self.url}: the transport was closed")
        body = b"" if document is None else json.dumps(document).encode()
        return self._handler(method, path, body)

    def received_bytes(self) -> int | None:
        """Return None: there is no network."""
        return None

    def interrupt(self) -> None:
        """Do nothing: the handler does not wait for a network."""

    def close(self) -> None:
        """Refuse further requests."""
        self._closed = True
