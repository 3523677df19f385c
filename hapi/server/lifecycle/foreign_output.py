"""Output of libraries written in C on standard error, as lines of the log, for whose reader nobody waits."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO, cast

from hapi.process.output_stream import Background, UnwaitingStream, settle
from hapi.server.lifecycle.log_limits import dropped_line
from hapi.text import printable

log = logging.getLogger("hapi.server")

LINES_A_MINUTE = 60
"""More are counted, not shown: whoever sends damaged images must not fill the log."""
LONGEST_LINE = 400
"""Characters."""
END_SECONDS = 1.0
"""Seconds at the start and the end for a reader to take what waits for it."""
_STDERR = 2


@contextlib.contextmanager
def foreign_output_logged() -> Iterator[None]:
    """Log the output of others on descriptor 2 in the block; Python's standard error goes where it went, but
    whoever writes to it never waits for its reader.
    """
    stream = sys.stderr
    try:
        own = stream.fileno() == _STDERR
    except (AttributeError, OSError, ValueError):  # none, or not a file
        own = False
    if not own:
        yield
        return
    settle(stream, END_SECONDS)
    kept = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.dup2(writing, _STDERR)
    os.close(writing)
    log_stream = UnwaitingStream(kept, "stderr", Background(), dropped_line)
    sys.stderr = cast(TextIO, log_stream)
    faulthandler.enable(kept)  # the last words of a crash would be lost in the pipe
    reader = threading.Thread(target=_log_lines, args=(reading,), name="hapi-stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        faulthandler.disable()
        os.dup2(kept, _STDERR)
        reader.join(0.5)  # until the last process that inherited the pipe has ended, or not
        log_stream.settle(END_SECONDS)
        sys.stderr = stream


def _log_lines(reading: int) -> None:
    shown = Allowance(LINES_A_MINUTE, 60.0)
    unfinished = b""
    while data := os.read(reading, 1 << 14):
        *lines, unfinished = (unfinished + data).split(b"\n")
        if len(unfinished) > LONGEST_LINE:
            lines, unfinished = [*lines, unfinished], b""
        for raw in lines:
            line = printable(raw.decode("utf-8", "replace").strip(), LONGEST_LINE)
            if line and shown.take(time.monotonic()):
                extra = {"text": line, **({"left_out": shown.left_out} if shown.left_out else {})}
                shown.left_out = 0
                log.info("library output", extra=extra)
    os.close(reading)


class Allowance:
    """Allowance of so many in each period."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._since = -seconds
        self._taken = 0
        self.left_out = 0
        """Refused since the caller last set it to 0."""

    def take(self, now: float) -> bool:
        """Return whether there is one more in the period of ``now`` (seconds)."""
        if now - self._since >= self._seconds:
            self._since, self._taken = now, 0
        if self._taken >= self._limit:
            self.left_out += 1
            return False
        self._taken += 1
        return True
