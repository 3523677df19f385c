"""Answers are read in large steps: the system wakes the reader when much has come, not for every packet.

A link of 160 Mbit/s brings 13,000 packets a second. Waking a thread for each of them, which then waits for Python's
lock, takes a fifth of the trainer's core. Each side of a socket may say from how many bytes on it is to be woken: its
low-water mark (``SO_RCVLOWAT``, socket(7)).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
from time import monotonic
from typing import Any

from hapi.wire.transport.slow_server import AnswerGuard, AnswerLimits

LOW_WATER = 64 << 10
"""Bytes for which a reader is woken, or fewer when no more are to come."""
_TLS_RECORD = 17 << 10
"""Most bytes of a TLS record, of which a part may have been read from the socket and not been given out."""


class LowWaterResponse(http.client.HTTPResponse):
    """An answer whose body is read from its socket in steps of :data:`LOW_WATER`, and not at any pace."""

    def __init__(
        self, sock: socket.socket, *args: Any, limits: AnswerLimits | None = None, **settings: Any
    ) -> None:
        super().__init__(sock, *args, **settings)
        self.guard = AnswerGuard(limits or AnswerLimits())
        self.fp.close()
        # The buffer asks for its own size or, for more than that, for no more than its reader wants.
        self.fp = io.BufferedReader(_LowWater(sock, self.guard), io.DEFAULT_BUFFER_SIZE)


class _LowWater(io.RawIOBase):
    """The bytes of a blocking socket, which keeps its timeout: the longest time in which nothing comes."""

    def __init__(self, sock: socket.socket, guard: AnswerGuard) -> None:
        self._sock = sock
        self._guard = guard
        self._held = sock.makefile("rb", buffering=0)
        """Keeps the socket open until the answer has been read."""
        self._margin = _TLS_RECORD if isinstance(sock, ssl.SSLSocket) else 0
        self._mark = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Some bytes, at most those that the buffer takes: all of them must be on their way, or the end."""
        wanted, guard = len(buffer), self._guard
        self._set_mark(min(LOW_WATER, wanted - self._margin) if wanted > io.DEFAULT_BUFFER_SIZE else 1)
        before = monotonic()
        try:
            count = self._sock.recv_into(buffer)
        except TimeoutError:
            if self._mark == 1:
                raise
            count = self._peek(buffer)
        now = monotonic()
        guard.waited += now - before
        guard.received += count
        if now >= guard.next_look and count:
            guard.check()
        return count

    def _peek(self, buffer: Any) -> int:
        """Bytes that a slow link has brought below the mark; TimeoutError for none."""
        timeout = self._sock.gettimeout()
        self._set_mark(1)
        self._sock.settimeout(0)
        try:
            return self._sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError("timed out") from None
        finally:
            self._sock.settimeout(timeout)

    def _set_mark(self, mark: int) -> None:
        mark = max(1, mark)
        if mark != self._mark:
            self._mark = mark
            # A system without it wakes the reader more often.
            with contextlib.suppress(OSError, AttributeError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    def close(self) -> None:
        self._held.close()
        super().close()
