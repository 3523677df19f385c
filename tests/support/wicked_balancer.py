"""A balancer in front of one server that answers some requests for samples itself, or damages their answers."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from support.tiny_http import read_request
from support.waiting import PATIENCE

Deed = Callable[[socket.socket, Callable[[], Iterator[bytes]]], bool]
"""(connection of the client, the server's answer piece by piece) to whether the connection stays open."""

_FOR_SAMPLES = re.compile(rb"POST /v1/(?:extract|samples) ")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def whole(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
    """No misdeed."""
    for part in answer():
        client.sendall(part)
    return True


def page(status: str, *headers: str, keep: bool = True) -> Deed:
    """An error page of its own; the server is not asked."""
    body = f"<html><title>{status}</title></html>\n".encode()
    lines = [
        f"HTTP/1.1 {status}",
        "Server: balancer",
        "Content-Type: text/html",
        f"Content-Length: {len(body)}",
    ]

    def deed(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
        client.sendall("\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body)
        return keep

    return deed


def cut(nbytes: int, *, reset: bool = False) -> Deed:
    """So many bytes of the answer, head included, and then the connection's end."""

    def deed(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
        left = nbytes
        for part in answer():
            client.sendall(part[:left])
            left -= len(part[:left])
            if not left:
                break
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        return False

    return deed


def shortened(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
    """A well-formed answer that lacks the last tenth of the bytes."""
    head, _, body = b"".join(answer()).partition(b"\r\n\r\n")
    length = len(body) * 9 // 10
    head, count = re.subn(rb"(?i)content-length: \d+", b"Content-Length: %d" % length, head)
    assert count == 1, head
    client.sendall(head + b"\r\n\r\n" + body[:length])
    return True


def deaf(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
    """The connection ends although a request has come; on one that was kept alive it is asked again at once."""
    return False


def hanging_up(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
    """A good answer that says nothing of the connection's end, which follows it."""
    return whole(client, answer) and False


def early(client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
    """An interim answer before the good one."""
    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    return whole(client, answer)


def _received(server: socket.socket) -> bytes:
    """The next bytes of an answer that is not whole."""
    if not (part := server.recv(1 << 16)):
        raise ConnectionError("the server is gone")
    return part


class Held:
    """A deed that holds its request until it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, client: socket.socket, answer: Callable[[], Iterator[bytes]]) -> bool:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return whole(client, answer)

    def wait(self) -> None:
        """Return when a request is held."""
        assert self.begun.wait(PATIENCE), "no request came"


class WickedBalancer:
    """Listens on a free loopback port; does ``deeds`` to requests for samples, one after the other and then none."""

    def __init__(self, port: int, deeds: Sequence[Deed]) -> None:
        self._target, self._deeds, self._lock = port, iter(deeds), threading.Lock()
        self.left = len(deeds)
        """Deeds to be done yet."""
        self.broken = 0
        """Requests whose answer the server did not give whole, those for its health left out."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while (request := read_request(client)) is not None:
                try:
                    stays = self._deed(request)(client, lambda request=request: self._answer(request))  # type: ignore[misc]
                except OSError:
                    with self._lock:
                        self.broken += not request.startswith(b"GET /readyz ")
                    raise
                if not stays:
                    return

    def _deed(self, request: bytes) -> Deed:
        if not _FOR_SAMPLES.match(request):
            return whole
        with self._lock:
            found = next(self._deeds, None)
            self.left -= found is not None
        return found or whole

    def _answer(self, request: bytes) -> Iterator[bytes]:
        """The server's answer to the request, on a connection of its own of which the client hears nothing."""
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            first, rest = request.split(b"\r\n", 1)
            server.sendall(first + b"\r\nConnection: close\r\n" + rest)
            head = b""
            while b"\r\n\r\n" not in head:
                head += _received(server)
            yield re.sub(rb"(?i)connection: close\r\n", b"", head, count=1)
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            assert length is not None, head
            left = int(length[1]) - len(head.partition(b"\r\n\r\n")[2])
            while left:
                part = _received(server)
                left -= len(part)
                yield part

    def close(self) -> None:
        self._listener.close()


def wicked(port: int, *deeds: Deed) -> contextlib.closing[WickedBalancer]:
    """A :class:`WickedBalancer` before the server at ``port``."""
    return contextlib.closing(WickedBalancer(port, deeds))


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """The port of a machine that is gone: it answers no connection, and refuses none."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # those that wait to be accepted leave no room
            waiting = ends.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
