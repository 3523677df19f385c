"""A proxy between a client and a server that changes what the server sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """A TCP proxy in front of a server that changes what the server sends, connection by connection."""

    def __init__(self, port: int, change: Callable[[bytes], bytes | None], buffer: int | None = None) -> None:
        """``buffer``: bytes of answers that the system may hold for each connection."""
        self._target = port
        self._buffer = buffer
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                upstream = socket.socket()
                if self._buffer is not None:
                    upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
                upstream.connect(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(client, upstream, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(upstream, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = self._change(data) if answers else data
                if changed is None:
                    break
                target.sendall(changed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._listener.close()
