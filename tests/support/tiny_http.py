"""An HTTP server of a few lines that answers exactly the bytes a test wants, and shows what it was asked."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Reply = Callable[[socket.socket, bytes], bool]
"""(connection, request) to whether the connection stays open."""


class TinyServer:
    """Listens on a free loopback port; ``reply`` answers each request on each connection."""

    def __init__(self, reply: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.reply, self.tls = reply, tls
        self.requests: list[bytes] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            connection = self.tls.wrap_socket(plain, server_side=True) if self.tls else plain
            self._open.append(connection)
            with connection:
                while (request := read_request(connection)) is not None:
                    self.requests.append(request)
                    if not self.reply(connection, request):
                        return

    def hang_up(self) -> None:
        """Close every connection that is open, as a server does that has waited long enough."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()


def read_request(connection: socket.socket) -> bytes | None:
    """The next request, whole; None at the end."""
    received = b""
    while b"\r\n\r\n" not in received and received[:1] != b"\x16":  # 0x16 begins a TLS greeting
        part = connection.recv(65536)
        if not part:
            return None
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answer(body: bytes, status: str = "200 OK", *headers: str, keep: bool = True) -> Reply:
    """Always this answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    raw = "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def reply(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(raw)
        return keep

    return reply


def raw(data: bytes, keep: bool = False) -> Reply:
    """Always these bytes."""

    def reply(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(data)
        return keep

    return reply


def tls_server(certificate: Path) -> ssl.SSLContext:
    """For a server that shows this certificate, whose file holds the key as well."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@contextlib.contextmanager
def serving(reply: Reply, tls: ssl.SSLContext | None = None) -> Iterator[TinyServer]:
    server = TinyServer(reply, tls)
    try:
        yield server
    finally:
        server.close()
