"""Standard output and errors whose loss ends no work: a closed pipe, a full disk, a terminal that is gone."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from hapi.errors import HapiError

_STDOUT, _STDERR = 1, 2
_FOR_GOOD = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
"""Errors that do not pass. After other failures, such as a full disk, later lines are tried again."""
_READER_SECONDS = 60.0
"""Longest wait for a reader that takes nothing, where the descriptor itself does not wait."""
_HELD = 8192
"""Most characters of an unfinished line that are held back."""

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
        failed = None
        with self._lock:
            data, self._held = self._held.encode("utf-8", "backslashreplace"), ""
            if self._gone or not data:
                return
            try:
                _write_all(self._descriptor, data)
            except OSError as error:
                self._gone = error.errno in _FOR_GOOD
                if self.why is None:
                    self.why, failed = error.strerror or str(error), error
        if (
            failed is not None and self._on_loss is not None
        ):  # without the lock: it may write to the other stream
            self._on_loss(self, failed)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether a person may be looking."""
        return not self._gone and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True, whether or not text arrives."""
        return True


class Outputs:
    """Both standard streams of a command while it runs; see :func:`standard_outputs`."""

    def __init__(self, program: str, *, goes_on: bool) -> None:
        self._program, self._goes_on = program, goes_on
        self.stdout = OutputStream(_STDOUT, "stdout", self._lost)
        self.stderr = OutputStream(_STDERR, "stderr", self._lost)

    def lost(self) -> list[str]:
        """Return a line for each stream that lost text."""
        return [f"{s.title}: {s.why}; lines are missing" for s in (self.stdout, self.stderr) if s.why]

    def _lost(self, stream: OutputStream, error: OSError) -> None:
        if stream is self.stdout and not self._goes_on:
            if isinstance(error, BrokenPipeError):
                raise error
            raise HapiError(f"stdout cannot be written: {stream.why}")
        other = self.stderr if stream is self.stdout else self.stdout
        if self._goes_on:
            other.write(
                f"{self._program}: {stream.title} cannot be written ({stream.why}); the work goes on\n"
            )


current: Outputs | None = None
"""Return the streams of the running command; None if there is none, or if it does not own the process's
streams.
"""


@contextlib.contextmanager
def standard_outputs(program: str, *, goes_on: bool) -> Iterator[None]:
    """Make losses of standard output harmless inside the block.

    A loss of stderr is never an error. Streams that the process does not own (in a test) stay as they are.

    Args:
        program: name of the command, for messages.
        goes_on: the command's work does not need stdout. If False, a loss of stdout raises
            :class:`HapiError`, or BrokenPipeError when the reader has gone.
    """
    global current
    _hold_descriptors()
    outputs, before = Outputs(program, goes_on=goes_on), (sys.stdout, sys.stderr, current)
    own_out, own_err = _is_own(sys.stdout, _STDOUT), _is_own(sys.stderr, _STDERR)
    try:
        for stream, replaced, own in (
            (outputs.stdout, sys.stdout, own_out),
            (outputs.stderr, sys.stderr, own_err),
        ):
            if own and replaced is None:
                stream.why = "it was closed at the start"
        sys.stdout = cast(TextIO, outputs.stdout) if own_out else sys.stdout
        sys.stderr = cast(TextIO, outputs.stderr) if own_err else sys.stderr
        current = outputs if own_out or own_err else None
        yield
    finally:
        with contextlib.suppress(OSError, HapiError):
            outputs.stdout.flush()
        outputs.stderr.flush()
        sys.stdout, sys.stderr, current = before


def _hold_descriptors() -> None:
    """Open the null device for each closed standard descriptor, so that no other file takes its number."""
    for descriptor in (0, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, waiting for a reader where the descriptor itself would not wait."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], _READER_SECONDS)[1]:
                raise


def _is_own(stream: TextIO | None, descriptor: int) -> bool:
    """Return whether ``stream`` is Python's own for ``descriptor``, or None because that was closed at the
    start.
    """
    if stream is None:
        return True
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        if stream.fileno() != descriptor:
            return False
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
