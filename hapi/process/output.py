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
"""What does not get better. Other failures, such as a full disk, may: later lines are tried again."""
_READER_SECONDS = 60.0
"""Longest wait for a reader that takes nothing, where the descriptor itself does not wait."""
_HELD = 8192
"""Most characters that wait for the end of their line."""

Lost = Callable[["OutputStream", OSError], None]


class OutputStream(io.TextIOBase):
    """Text to a descriptor, a line at a time, with no buffer that the interpreter would flush at its end. Thread-safe.

    ``lost`` is called once, when something could not be written for the first time; what it raises, the writer gets.
    """

    def __init__(self, descriptor: int, title: str, lost: Lost | None = None) -> None:
        """``title``: what a person calls it, such as ``stdout``."""
        self.title = title
        self.why: str | None = None
        """Why something was lost, in the system's words; None as long as nothing was."""
        self._descriptor, self._on_loss = descriptor, lost
        self._lock = threading.Lock()
        self._held = ""
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Text is bytes of UTF-8, whatever the locale; what is no text is escaped."""
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
        """Write what is held."""
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
        """Whether a person may be looking."""
        return not self._gone and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always, whether or not it arrives."""
        return True


class Outputs:
    """Both standard streams of a command while it runs; see :func:`standard_outputs`."""

    def __init__(self, program: str, *, goes_on: bool) -> None:
        self._program, self._goes_on = program, goes_on
        self.stdout = OutputStream(_STDOUT, "stdout", self._lost)
        self.stderr = OutputStream(_STDERR, "stderr", self._lost)

    def lost(self) -> list[str]:
        """A line for each stream of which something was lost."""
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
"""Those of the command that runs; None where none does, or its streams are not the process's own."""


@contextlib.contextmanager
def standard_outputs(program: str, *, goes_on: bool) -> Iterator[None]:
    """Inside the block no loss of stderr is an error, and one of stdout only to a command that is there to print.

    ``goes_on``: the command does its work without stdout too; else a loss raises :class:`HapiError`, or BrokenPipeError
    when the reader has gone. Streams that are not the process's own (a test's) stay as they are.
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
    """Open the null device for each standard descriptor that is closed: else another file would become one."""
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
    """Whether ``stream`` is Python's for ``descriptor``, or none since that was closed at the start."""
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
