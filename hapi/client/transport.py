"""The one seam at the network: everything the client asks of a server goes through a :class:`Transport`.

Two fill it: :class:`HttpTransport` over sockets, and :class:`LoopbackTransport`, which calls a handler in the
same process, so that a whole split training runs in a test without a port. Errors of sockets and of HTTP
become :mod:`hapi.errors` here and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from hapi.errors import BadRequestError, HapiError, TransportError, UsageError, from_problem
from hapi.wire.frames import Buffer, BufferSource, FrameLimits, FrameReader
from hapi.wire.messages import REQUEST_ID_HEADER

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 64 << 20
"""Largest JSON answer (descriptions of models with many layers) that a client reads."""


class Transport(Protocol):
    """A way to one server."""

    url: str

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request, return the JSON answer; raises the :class:`HapiError` that the server sent."""

    def stream(self, path: str, document: Any, receive: Callable[[FrameReader], T]) -> T:
        """POST ``document`` and give the answer's frames to ``receive``, which must read to the end frame."""

    def close(self) -> None:
        """Break what is under way and release connections; may be called from any thread, and twice."""


class HttpTransport:
    """HTTP/1.1 with kept-alive connections, one per request under way. Thread-safe.

    ``timeout`` is the longest silence, in seconds, before a server counts as dead.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        timeout: float = 60.0,
        limits: FrameLimits | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._scheme, self._host, self._port, self._base = _split_url(url)
        self._tls = _tls_context(ca_file) if self._scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._active: set[http.client.HTTPConnection] = set()
        self._closed = False

    def call(self, method: str, path: str, document: Any = None) -> Any:
        with self._exchange(method, path, document) as response:
            return _read_document(response)

    def stream(self, path: str, document: Any, receive: Callable[[FrameReader], T]) -> T:
        with self._exchange("POST", path, document) as response:
            result = receive(FrameReader(response, self._limits))
            response.read()  # the end of the chunked or counted body, so that the connection can be used again
            return result

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._active]
            self._idle.clear()
        for connection in connections:
            _break(connection)

    @contextlib.contextmanager
    def _exchange(self, method: str, path: str, document: Any) -> Iterator[http.client.HTTPResponse]:
        """One request; the connection goes back to the idle ones only after a whole, good answer."""
        request_id = uuid.uuid4().hex[:16]
        connection: http.client.HTTPConnection | None = None
        try:
            connection, response = self._send(method, path, document, request_id)
            if response.status != 200:
                problem = _read_document(response, lenient=True)
                raise _with_request_id(from_problem(problem, response.status), request_id)
            yield response
            if response.will_close or not response.isclosed():
                _break(connection)
            else:
                self._release(connection)
        except (OSError, http.client.HTTPException) as error:
            if connection is not None:
                _break(connection)
            raise TransportError(
                f"{self.url}{path}: {_reason(error)} (request {request_id}); is the server running and reachable?"
            ) from error
        except BaseException:
            if connection is not None:
                _break(connection)
            raise
        finally:
            if connection is not None:
                with self._lock:
                    self._active.discard(connection)

    def _send(
        self, method: str, path: str, document: Any, request_id: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        body = None if document is None else json.dumps(document, separators=(",", ":")).encode()
        headers = {**self._headers, REQUEST_ID_HEADER: request_id, "Content-Type": "application/json"}
        while True:
            connection, reused = self._connection()
            try:
                connection.request(method, self._base + quote(path), body=body, headers=headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
                self._drop(connection)
                if (
                    not reused
                ):  # a kept-alive connection may have been closed meanwhile: once more on a fresh one
                    raise
            except BaseException:
                self._drop(connection)
                raise

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._closed:
                raise TransportError(f"{self.url}: the transport was closed")
            if self._idle:
                connection = self._idle.pop()
                self._active.add(connection)
                return connection, True
            if self._tls is not None:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout, context=self._tls
                )
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
            self._active.add(connection)
            return connection, False

    def _release(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        _break(connection)

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        _break(connection)
        with self._lock:
            self._active.discard(connection)


Handler = Callable[[str, str, bytes], tuple[int, Mapping[str, str], Iterator[Buffer]]]
"""(method, path, body) to (status, headers, body buffers): a server without its sockets."""


class LoopbackTransport:
    """Calls a server's handler in this process: the same documents and frames, no socket."""

    def __init__(self, handler: Handler, url: str = "loopback:") -> None:
        self.url = url
        self._handler = handler
        self._closed = False

    def call(self, method: str, path: str, document: Any = None) -> Any:
        status, buffers = self._exchange(method, path, document)
        body = b"".join(bytes(b) for b in buffers)
        if status != 200:
            raise from_problem(json.loads(body), status)
        return json.loads(body)

    def stream(self, path: str, document: Any, receive: Callable[[FrameReader], T]) -> T:
        status, buffers = self._exchange("POST", path, document)
        if status != 200:
            raise from_problem(json.loads(b"".join(bytes(b) for b in buffers)), status)
        return receive(FrameReader(BufferSource(buffers)))

    def _exchange(self, method: str, path: str, document: Any) -> tuple[int, Iterator[Buffer]]:
        if self._closed:
            raise TransportError(f"{self.url}: the transport was closed")
        body = b"" if document is None else json.dumps(document).encode()
        status, _, buffers = self._handler(method, path, body)
        return status, buffers

    def close(self) -> None:
        self._closed = True


def _split_url(url: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, base path) of a server URL; :class:`UsageError` when it is none."""
    hint = f"server URL {url!r}: expected http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(hint)
    if parts.username or parts.password:
        raise UsageError(
            f"server URL {parts.hostname!r}: no user or password in it; use a token (--token-file)"
        )
    return (
        parts.scheme,
        parts.hostname,
        port or (443 if parts.scheme == "https" else 80),
        parts.path.rstrip("/"),
    )


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"CA file {ca_file!r} cannot be read: {_reason(error)}") from None


def _read_document(response: http.client.HTTPResponse, *, lenient: bool = False) -> Any:
    body = response.read(MAX_DOCUMENT_BYTES + 1)
    try:
        if len(body) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"longer than {MAX_DOCUMENT_BYTES} bytes")
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        if lenient:
            return None
        raise BadRequestError(f"the server's answer is not JSON ({error}); is this a hapi-server?") from None


def _with_request_id(error: HapiError, request_id: str) -> HapiError:
    return type(error)(f"{error} (request {request_id})", retry_after=error.retry_after)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke in the middle of an answer"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)


def _break(connection: http.client.HTTPConnection) -> None:
    """Close at once, also under a thread that is blocked in a read."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(2)
    with contextlib.suppress(OSError):
        connection.close()
