"""Text streams to a descriptor: one that waits for its reader, and one that never does."""

from __future__ import annotations

import errno
import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_FOR_GOOD = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
"""Errors that do not pass. After other failures, such as a full disk, later lines are tried again."""
_READER_SECONDS = 60.0
"""Longest wait for a reader that takes nothing, where the descriptor itself does not wait."""
_HELD = 8192
"""Most characters of an unfinished line that are held back."""
WAITING_BYTES = 1 << 20
"""Most bytes that wait for a reader that takes nothing, in streams that do not wait themselves."""

Lost = Callable[["OutputStream", OSError], None]


class OutputStream(io.TextIOBase):
    """Text stream to a descriptor, written line by line without a buffer. Thread-safe.

    ``lost`` is called once, at the first failure to write; its exception reaches the writer.
    """

    def __init__(self, descriptor: int, title: str, lost: Lost | None = None) -> None:
        """Write to ``descriptor``; messages call it ``title``, such as ``stdout``."""
        self.title = title
        self.why: str | None = None
        """The system's reason for the first loss; None as long as everything was written."""
        self._descriptor, self._on_loss = descriptor, lost
        self._lock = threading.Lock()
        self._held = ""
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Always UTF-8, whatever the locale; lone surrogates are escaped."""
        return "utf-8"

    def write(self, text: str) -> int:
        """Write whole lines at once, and hold the rest until its line ends."""
        with self._lock:
            self._held += text
            ready = "\n" in text or "\r" in text or len(self._held) > _HELD
        if ready:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write the text that is held back."""
        with self._lock:
            data, self._held = self._held.encode("utf-8", "backslashreplace"), ""
            error = self._put(data) if data else None
        self._tell_loss(error)  # without the lock: it may write to the other stream

    def _put(self, data: bytes) -> OSError | None:
        """Write ``data``; return the error at the first loss."""
        return self._write_out(data, _READER_SECONDS)

    def _write_out(self, data: bytes, seconds: float | None) -> OSError | None:
        if self._gone:
            return None
        try:
            _write_all(self._descriptor, data, seconds)
        except OSError as error:
            self._gone = error.errno in _FOR_GOOD
            if self.why is None:
                self.why = error.strerror or str(error)
                return error
        return None

    def _tell_loss(self, error: OSError | None) -> None:
        if error is not None and self._on_loss is not None:
            self._on_loss(self, error)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether a person may be looking."""
        return not self._gone and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True, whether or not text arrives."""
        return True


class Background:
    """A thread that writes for streams, in the order in which they gave their text. Thread-safe.

    While a reader takes nothing, up to ``most_bytes`` wait for it. What comes beyond that is refused, until all that
    waits is written.
    """

    def __init__(self, most_bytes: int = WAITING_BYTES) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting = deque[tuple[UnwaitingStream, bytes]]()
        self._bytes = 0
        self._refused = dict[UnwaitingStream, None]()
        """Streams whose text was refused since everything was last written."""
        self._started = self._closed = False

    def put(self, stream: UnwaitingStream, data: bytes) -> None:
        """Have ``data`` written, or dropped by ``stream``."""
        with self._changed:
            full = self._waiting and self._bytes + len(data) > self._most_bytes
            if self._closed or self._refused or full:
                self._refused[stream] = None
                stream.drop(data)
                return
            if self._start():
                self._waiting.append((stream, data))
                self._bytes += len(data)
                self._changed.notify_all()
                return
        stream.write_now(data)

    def _start(self) -> bool:
        """Start the thread unless it runs; return False where there can be no more threads."""
        if not self._started:
            try:
                threading.Thread(target=self._write, name="hapi-output", daemon=True).start()
            except RuntimeError:
                return False
            self._started = True
        return True

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until all is written, no longer than ``seconds``; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Write what waits, and nothing more."""
        try:
            self.settle()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                stream, data = self._waiting[0]
            with suppress(MemoryError):  # the next line must come
                stream.write_now(data)
            with self._changed:
                self._waiting.popleft()
                self._bytes -= len(data)
                if not self._waiting:
                    self._all_written()

    def _all_written(self) -> None:
        with suppress(MemoryError):
            for stream in self._refused:
                if line := stream.told_dropped():
                    self._waiting.append((stream, line))
                    self._bytes += len(line)
        self._refused.clear()
        self._changed.notify_all()


class UnwaitingStream(OutputStream):
    """Text stream whose writers never wait: a thread writes. Lines for which its reader leaves no room are dropped and
    counted; one line tells how many as soon as it reads on.
    """

    def __init__(
        self,
        descriptor: int,
        title: str,
        background: Background,
        tell: Callable[[int], str],
        lost: Lost | None = None,
    ) -> None:
        """Write to ``descriptor`` by ``background``; ``tell`` makes the line about a number of dropped lines."""
        super().__init__(descriptor, title, lost)
        self._background, self._tell = background, tell
        self.dropped = self._untold = 0
        """Lines dropped so far."""

    def settle(self, seconds: float) -> bool:
        """Wait until all is written, no longer than ``seconds``; return whether it is."""
        self.flush()
        return self._background.settle(seconds)

    def write_now(self, data: bytes) -> None:
        """Write ``data``, for as long as that takes."""
        self._tell_loss(self._write_out(data, None))

    def drop(self, data: bytes) -> None:
        """Count the lines of ``data``, which nobody gets; for :class:`Background`."""
        lines = data.count(b"\n")
        self.dropped += lines
        self._untold += lines

    def told_dropped(self) -> bytes:
        """Return the line about those dropped since the last call, empty for none; for :class:`Background`."""
        line = self._tell(self._untold).encode() if self._untold else b""
        self._untold = 0
        return line

    def _put(self, data: bytes) -> OSError | None:
        if not self._gone:
            self._background.put(self, data)
        return None


def settle(stream: TextIO | UnwaitingStream, seconds: float) -> None:
    """Have all text of ``stream`` written; one whose writers never wait gets ``seconds`` for that."""
    if isinstance(stream, UnwaitingStream):
        stream.settle(seconds)
    else:
        stream.flush()


def _write_all(descriptor: int, data: bytes, seconds: float | None) -> None:
    """Write all of ``data``; wait ``seconds`` for a reader, None for ever, where the descriptor itself does not."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], seconds)[1]:
                raise
