"""Cancellation of one request among those of a transport, by another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from hapi.errors import TransportError
from hapi.wire.frames import Buffer


class Cancellation:
    """Ends one attempt at a request, and never another one that uses its connection later. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], object] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Break the request; one that was not sent yet fails when it is."""
        with self._lock:
            self.cancelled = True
            if self._end is not None:
                self._end()

    def check(self) -> None:
        """Raise :class:`TransportError` once it was cancelled."""
        if self.cancelled:
            raise TransportError("the request was cancelled")

    def until(self, buffers: Iterator[Buffer]) -> Iterator[Buffer]:
        """Yield ``buffers``; the next one raises :class:`TransportError` once it was cancelled."""
        for buffer in buffers:
            self.check()
            yield buffer

    def begin(self, end: Callable[[], object]) -> None:
        """Note that the request is sent over a connection that ``end`` breaks.

        Raises:
            TransportError: it was cancelled.
        """
        with self._lock:
            self.check()
            self._end = end

    def over(self) -> None:
        """Note that the connection is no longer the request's."""
        with self._lock:
            self._end = None
