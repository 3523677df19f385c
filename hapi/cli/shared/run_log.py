"""The log of a run: the lines of its console and its log records, with times, in a file."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from hapi.errors import HapiError

_HELD_LINES = 1000
"""Most lines that are kept until the file is known."""


class RunLog:
    """Copies what the console is told to a file, but no progress bar; log records of level INFO go there too.

    A context manager, inside which stdout and stderr are copied. Lines from before :meth:`open` are held back. A file
    that cannot be written is told once and ends nothing. Thread-safe.
    """

    def __init__(self, program: str) -> None:
        """Begin; ``program`` is the command's name for messages."""
        self._program = program
        self._lock = threading.RLock()
        self._held: deque[str] = deque(maxlen=_HELD_LINES)
        self._file: TextIO | None = None
        self._failed = False
        self._before: Any = None

    def open(self, path: Path) -> None:
        """Write to ``path`` from now on, after what it holds already."""
        with self._lock:
            try:
                self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                self._lost(error)
                return
            held, self._held = list(self._held), deque(maxlen=0)
            self._write("".join(held))

    def line(self, text: str) -> None:
        """Add one line, or several, each with the time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{now} {line}".rstrip() + "\n" for line in text.splitlines())
        with self._lock:
            if self._file is None:
                self._held.append(lines)
            else:
                self._write(lines)

    def _write(self, text: str) -> None:
        try:
            if self._file is not None:
                self._file.write(text)
                self._file.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            stream = self._before[1] if self._before else sys.stderr
            print(
                f"{self._program}: the log cannot be written ({error.strerror}); the work goes on",
                file=stream,
            )

    def __enter__(self) -> Self:
        root, own = logging.getLogger(), logging.getLogger("hapi")
        handlers: list[logging.Handler] = [_ToLog(self)]
        if not root.handlers:  # with any, Python no longer shows warnings by itself
            handlers.append(_ToConsole(sys.stderr))
        self._before = sys.stdout, sys.stderr, handlers, own.level
        for handler in handlers:
            root.addHandler(handler)
        if own.level == logging.NOTSET:
            own.setLevel(logging.INFO)
        sys.stdout, sys.stderr = _Copied(sys.stdout, self), _Copied(sys.stderr, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Copied):
                stream.end_line()
        if isinstance(error, HapiError):
            self.line(f"{self._program}: error: {error}")
        elif error is not None:
            self.line("".join(traceback.format_exception(error)).rstrip())
        sys.stdout, sys.stderr, handlers, level = self._before
        for handler in handlers:
            logging.getLogger().removeHandler(handler)
        logging.getLogger("hapi").setLevel(level)
        with self._lock:
            if self._file is not None:
                try:
                    self._file.close()
                except OSError as failed:
                    self._lost(failed)
                self._file = None


class _Copied(io.TextIOBase):
    """A stream whose lines a log gets too; text with carriage returns is a progress bar's."""

    def __init__(self, stream: TextIO, log: RunLog) -> None:
        self._stream, self._log = stream, log
        self._begun = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(text)
        if "\r" not in text:
            whole, newline, remainder = (self._begun + text).rpartition("\n")
            self._begun = remainder
            if newline:
                self._log.line(whole or " ")
        return len(text)

    def end_line(self) -> None:
        """Give the log what no line end has followed."""
        if self._begun:
            self._log.line(self._begun)
            self._begun = ""

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


class _ToLog(logging.Handler):
    """Log records as lines of a run's log."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.INFO)
        self._log = log
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.line(self.format(record))


class _ToConsole(logging.Handler):
    """Warnings on the console, as Python itself shows them, but beside a progress bar and not through it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        try:
            with tqdm.external_write_mode(sys.stderr):
                self._stream.write(f"{self.format(record)}\n")
        except (OSError, ValueError):
            self.handleError(record)
