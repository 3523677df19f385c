"""Listening sockets that accept only as many connections as there is room for, even when resources are short.

asyncio answers a lack of descriptors with a traceback for each connection that waits, 512 a second, and
accepts nothing meanwhile. These sockets count accepted connections, keep one descriptor aside to turn surplus
ones away, and are told when a connection is closed, also one whose TLS handshake never ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl

from aiohttp import web

from hapi.errors import SHORT_OF
from hapi.server.http.connections import FIRST_REQUEST_SECONDS, Connections, OpenConnection

ACCEPTED_AT_ONCE = 8
"""Connections accepted in one turn of the event loop: those that were ended are closed between two turns."""
BACKLOG = 512
"""Connections that the system holds until they are accepted."""


class Accepted(socket.socket):
    """The socket of an accepted connection; tells when it is closed."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.connection: OpenConnection | None = None
        self.connections: Connections | None = None

    def close(self) -> None:
        """Close it, and give its place away."""
        super().close()
        if self.connections is not None and self.connection is not None:
            self.connections.closed(self.connection)


class Listener(socket.socket):
    """A listening socket of a server."""

    def __init__(self, family: int, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._connections = connections
        self._spare = _spare()

    def listen(self, backlog: int = BACKLOG) -> None:
        """Listen; asyncio's ``backlog`` is the number accepted in a turn, the system's is another thing."""
        super().listen(max(backlog, BACKLOG))

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection that has a place; BlockingIOError when there is none for now."""
        while True:
            if self._connections.awaits_closing():
                raise BlockingIOError
            try:
                sock, address = self._accepted()
            except OSError as error:
                if error.errno not in SHORT_OF:
                    raise
                self._connections.refuse("descriptors")
                self._turn_away(error)
                raise BlockingIOError from None
            connection = self._connections.admit(sock, str(address[0]))
            if connection is not None:
                sock.connection, sock.connections = connection, self._connections
                return sock, address
            sock.close()

    def _accepted(self) -> tuple[Accepted, tuple[object, ...]]:
        """A connection that waits; ``accept`` would lose the descriptor where there is no memory for its object."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        try:
            return Accepted(descriptor), address
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise

    def _turn_away(self, error: OSError) -> None:
        """Close one connection that waits, by the descriptor kept for that; asyncio waits if there is none."""
        if self._spare is None:
            self._spare = _spare()
        if self._spare is None:
            raise error
        os.close(self._spare)
        self._spare = None
        try:
            super().accept()[0].close()
        except OSError as refused:  # another thread took the descriptor
            if refused.errno in SHORT_OF:
                raise
        finally:
            self._spare = _spare()

    def close(self) -> None:
        """Close it and its reserve."""
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class ListenerSite(web.BaseSite):
    """Serves a runner on a :class:`Listener`."""

    def __init__(self, runner: web.AppRunner, listener: Listener, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, ssl_context=tls, backlog=ACCEPTED_AT_ONCE)
        self._listener = listener

    @property
    def name(self) -> str:
        """The address, as a URL."""
        host, port = self._listener.getsockname()[:2]
        return f"{'https' if self._ssl_context else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Begin to listen."""
        await super().start()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        self._server = await asyncio.get_running_loop().create_server(
            server,
            sock=self._listener,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=FIRST_REQUEST_SECONDS if self._ssl_context else None,
        )


async def listen(
    runner: web.AppRunner, connections: Connections, host: str, port: int, tls: ssl.SSLContext | None = None
) -> None:
    """Serve at all addresses of a host.

    Args:
        runner: of the application.
        connections: limits them.
        host: name or address.
        port: 0 takes any free one.
        tls: None for plain HTTP.

    Raises:
        OSError: an address cannot be used.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners = _bound([(family, address) for family, _, _, _, address in dict.fromkeys(found)], connections)
    for listener in listeners:
        await ListenerSite(runner, listener, tls).start()


def _bound(addresses: list[tuple[int, tuple[object, ...]]], connections: Connections) -> list[Listener]:
    """Sockets bound to all addresses that this machine has; all to one port."""
    listeners: list[Listener] = []
    failure: OSError | None = None
    with contextlib.ExitStack() as opened:
        for family, address in addresses:
            host, port, *more = address
            if not port and listeners:
                port = listeners[0].getsockname()[1]
            try:
                listener = Listener(family, connections)
                opened.callback(listener.close)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((host, port, *more))
            except OSError as error:
                failure = error
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
            else:
                listeners.append(listener)
        if not listeners:
            raise failure or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        opened.pop_all()
    return listeners


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
