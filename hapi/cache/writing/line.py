"""Line of work for a thread that writes to caches. It is bounded in bytes, so that a slow disk holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("hapi.cache")

LINE_BYTES = 64 << 20
"""Most bytes that wait or are being written, unless one piece of work alone has more."""


class WriterLine:
    """Does work in turn, in a thread of its own that begins with the first piece. Thread-safe."""

    def __init__(
        self, name: str, *, flush: Callable[[], None] | None = None, flush_seconds: float = 5.0
    ) -> None:
        """Begin with an empty line.

        Args:
            name: of the thread.
            flush: makes what was written outlive this process; called in the same thread.
            flush_seconds: seconds after which it is called, once something was written.
        """
        self._name, self._flush, self._flush_seconds = name, flush, flush_seconds
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        """Bytes of what waits, and of what is being written."""
        self._at_work = self._closed = self._warned = False
        self._thread: threading.Thread | None = None

    def offer(self, nbytes: int, write: Callable[[], None]) -> bool:
        """Let ``write`` be called, if there is a place in the line; returns at once.

        Args:
            nbytes: bytes that it writes, and holds until then.
            write: the work; when it raises, one warning says so.

        Returns:
            False when the line is full or closed, and nothing will be written.
        """
        with self._changed:
            if self._closed or (self._bytes and self._bytes + nbytes > LINE_BYTES):
                return False
            self._waiting.append((nbytes, write))
            self._bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait until nothing waits or is being written; return whether that came about within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._at_work, max(0.0, seconds))

    def drop(self) -> None:
        """Forget what waits."""
        with self._changed:
            self._bytes -= sum(nbytes for nbytes, _ in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Forget what waits, and end the thread once it has done what is in its hands, or after ``seconds``."""
        with self._changed:
            self._closed = True
        self.drop()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        flushed_at, flushed = time.monotonic(), True
        while self._next(None if flushed else self._flush_seconds):
            flushed = not self._write_next() and flushed
            if self._flush is None:
                flushed = True
            elif not flushed and time.monotonic() - flushed_at >= self._flush_seconds:
                self._carry_out(self._flush)
                flushed_at, flushed = time.monotonic(), True

    def _next(self, seconds: float | None) -> bool:
        """Wait for work, or ``seconds``; False when the line was closed and nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, seconds)
            return bool(self._waiting) or not self._closed

    def _write_next(self) -> bool:
        """Do the first piece of work; False when there is none."""
        with self._changed:
            if not self._waiting:
                return False
            nbytes, write = self._waiting.popleft()
            self._at_work = True
        try:
            self._carry_out(write)
        finally:
            del write
            with self._changed:
                self._bytes -= nbytes
                self._at_work = False
                self._changed.notify_all()
        return True

    def _carry_out(self, work: Callable[[], None]) -> None:
        """Do some work; when it fails, as where memory is short, the thread and what computes go on."""
        try:
            work()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning("cache: something was not kept (%s: %s)", type(error).__name__, error)
