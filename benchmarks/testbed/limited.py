"""A link of a chosen bandwidth where the system cannot make one: the client reads no faster than it would
allow.

All connections of a job share one :class:`RateLimit`. Unread bytes stay in the sockets, so TCP's
back-pressure reaches the server as it would from a slow link. It differs from a real link in two ways: the
system's buffers of each connection lie before the bottleneck (bounded, as the client has a few requests under
way), and nothing limits the way to the server, which carries requests only. Benchmarks that use it say so in
their conditions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hapi.errors import UsageError
from hapi.wire.frame_reader import ByteSource, FrameReader
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation

T = TypeVar("T")

PIECE_SECONDS = 0.01
"""Longest time that one read may take of the link, so that connections share it evenly and an interrupt is heard."""
BURST_SECONDS = 0.02
"""Longest idle time that a link may catch up on: more than the lateness of a sleeping thread, less than a
frame.
"""
_SMALLEST_PIECE = 1024
_MOST_BITS = 1e15


class RateLimit:
    """Gives out the link's time, first come, first served. Thread-safe.

    Each byte has a time at which a link of this rate would have delivered it (the virtual scheduling form of a token
    bucket, ITU-T I.371): :meth:`take` waits for that time. Lateness does not add up.
    """

    def __init__(
        self,
        bits_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """None: no limit. :class:`UsageError` for a rate that is not above 0."""
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()
        """Time at which the link will have delivered all taken bytes."""
        self._bits = _checked(bits_per_second)

    @property
    def bits_per_second(self) -> float | None:
        """The rate; None for no limit."""
        return self._bits

    def set_rate(self, bits_per_second: float | None) -> None:
        """Another rate from now on, also under transfers that are under way."""
        bits = _checked(bits_per_second)
        with self._lock:
            self._bits = bits
            self._free_at = min(self._free_at, self._clock())

    def part(self) -> int:
        """Most bytes to read at once."""
        bits = self._bits
        return 1 << 62 if bits is None else max(_SMALLEST_PIECE, int(bits / 8 * PIECE_SECONDS))

    def take(self, nbytes: int) -> None:
        """Return when the link has delivered ``nbytes`` more."""
        with self._lock:
            now = self._clock()
            if self._bits is not None:
                self._free_at = max(self._free_at, now - BURST_SECONDS) + nbytes * 8 / self._bits
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)


def _checked(bits: float | None) -> float | None:
    if bits is not None and not 0 < bits <= _MOST_BITS:
        raise UsageError(f"the link's rate is {bits:g} bit/s; it must be above 0 and at most {_MOST_BITS:g}")
    return bits


class LimitedTransport:
    """A transport whose frames come over a link of ``limit``'s rate; several may share it.

    Documents are not held up.
    """

    def __init__(self, inner: Transport, limit: RateLimit) -> None:
        self.url = inner.url
        self._inner = inner
        self._limit = limit
        self._lock = threading.Lock()
        self._delivered = 0

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request; only frames are limited."""
        return self._inner.call(method, path, document)

    def stream(
        self,
        path: str,
        document: Any,
        receive: Callable[[FrameReader], T],
        cancellation: Cancellation | None = None,
    ) -> T:
        """POST ``document``, with the limit on the answer's frames."""

        def limited(reader: FrameReader) -> T:
            """Read frames through the limit."""
            return receive(reader.over(lambda source: _LimitedSource(source, self._limit, self._count)))

        return self._inner.stream(path, document, limited, cancellation)

    def received_bytes(self) -> int | None:
        """Return the bytes that the link has delivered; bytes beyond that in the system's buffers do not
        count.
        """
        return self._delivered

    def interrupt(self) -> None:
        """Break the requests under way."""
        self._inner.interrupt()

    def close(self) -> None:
        """Close the transport."""
        self._inner.close()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._delivered += nbytes


class _LimitedSource:
    """A source of bytes that come over the link; ``count`` is told of each piece when it has."""

    def __init__(self, source: ByteSource, limit: RateLimit, count: Callable[[int], None]) -> None:
        self._source = source
        self._limit = limit
        self._count = count

    def readinto(self, buffer: memoryview, /) -> int | None:
        found = self._source.readinto(buffer[: self._limit.part()])
        if found:
            self._limit.take(found)
            self._count(found)
        return found
