"""Proxies between a client and a server: one changes what the server sends, one holds what it is asked."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

from support.waiting import PATIENCE

Change = Callable[[bytes], bytes | None]
"""What goes on in the place of some bytes; None breaks the connection."""


class Proxy:
    """A TCP proxy in front of a server that changes what the server sends, connection by connection."""

    def __init__(
        self,
        port: int,
        change: Change,
        buffer: int | None = None,
        ask: Change = lambda data: data,
        piece: int = 1 << 16,
    ) -> None:
        """``buffer``: bytes of answers that the system may hold for each connection; ``ask`` changes requests; most
        bytes that go on at a time are a ``piece``.
        """
        self._piece = piece
        self._target = port
        self._buffer = buffer
        self._change, self._ask = change, ask
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                upstream = socket.socket()
                if self._buffer is not None:
                    upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
                try:
                    upstream.connect(("127.0.0.1", self._target))
                except ConnectionError:  # the server is gone, and may come again
                    upstream.close()
                    client.close()
                    continue
                threading.Thread(target=self._pump, args=(client, upstream, self._ask), daemon=True).start()
                threading.Thread(
                    target=self._pump, args=(upstream, client, self._change), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece):
                changed = change(data)
                if changed is None:
                    break
                target.sendall(changed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._listener.close()


_REQUEST = re.compile(rb"POST /v1/(?:extract|samples) ")


def paced(port: int, seconds: float, change: Change = lambda data: data) -> contextlib.closing[Proxy]:
    """A proxy that lets a request for samples pass every so many seconds, and answers by ``change``.

    A job behind it lasts as long as a test needs and leaves the processors to others.
    """
    lock = threading.Lock()

    def ask(data: bytes) -> bytes:
        if _REQUEST.search(data):
            with lock:
                time.sleep(seconds)
        return data

    return contextlib.closing(Proxy(port, change, ask=ask))


class RequestGate:
    """Lets some requests for samples pass and holds the next ones until it is opened: a job cannot end before.

    So a test has all the time that it needs in the middle of a job. ``held`` is set as soon as a request waits.
    """

    def __init__(self, port: int, passes: int) -> None:
        self.held = threading.Event()
        self._left, self._lock, self._open = passes, threading.Lock(), threading.Event()
        self._proxy = Proxy(port, lambda data: data, ask=self._asked)
        self.url = self._proxy.url

    def _asked(self, data: bytes) -> bytes:
        with self._lock:
            self._left -= len(_REQUEST.findall(data))
            waits = self._left < 0
        if waits and not self._open.is_set():
            self.held.set()
            self._open.wait(2 * PATIENCE)
        return data

    def wait(self) -> None:
        """Return when a request waits."""
        assert self.held.wait(PATIENCE), "no request came to the gate"

    def open(self) -> None:
        """Let all pass from now on."""
        self._open.set()

    def close(self) -> None:
        self.open()
        self._proxy.close()


@contextlib.contextmanager
def gated(port: int, passes: int) -> Iterator[RequestGate]:
    """A :class:`RequestGate` before the server at ``port``."""
    gate = RequestGate(port, passes)
    try:
        yield gate
    finally:
        gate.close()
