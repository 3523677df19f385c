"""The server's log: one JSON object a line, few lines of one kind, and no bytes of malformed requests.

A repeated event must not fill the disk: at most :data:`MAX_LINES` lines of one kind are written in a minute, and
the number of those left out is logged when it is over. Requests that went well are not counted among these.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hapi.process.output_stream import UnwaitingStream

MAX_LINES = 30
"""Lines of one kind in a minute."""
WINDOW_SECONDS = 60.0
MAX_KINDS = 1000
"""Kinds told apart in a minute; what comes beyond is one kind."""
REQUEST = "request"
"""Event of the line that each request has."""

Kind = tuple[str, str, str, str]
_KIND = ("of", "error", "audit", "tenant")
"""Fields by which lines are told apart: their event, and these."""
_OTHERS: Kind = ("other lines", "", "", "")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, and what the record carries beside it."""

    _own = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        """One log record as one line of JSON."""
        document: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        document.update({k: v for k, v in vars(record).items() if k not in self._own and k[0] != "_"})
        if record.exc_info and record.exc_info[1] is not None:
            quoting = _quoting(record.exc_info[1])
            document["exception"] = quoting or self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def _quoting(error: BaseException) -> str:
    """The class of an error whose text, or that of its causes, quotes bytes of a request; empty for others."""
    found: BaseException | None = error
    for _ in range(20):
        if found is None:
            return ""
        if isinstance(found, HttpProcessingError | web.RequestPayloadError):
            return f"{type(found).__name__} (its text is left out, since it quotes the request)"
        found = found.__cause__ or found.__context__
    return ""


class Repeats:
    """Counts lines by kind. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[Kind, tuple[float, int]] = {}
        """Windows by kind, in the order of their ends: end, and lines in it."""

    def admits(self, kind: Kind, now: float) -> bool:
        """Count a line; whether it is to be written. Ask :meth:`over` first."""
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = _OTHERS
        ends, count = self._windows.get(kind, (now + WINDOW_SECONDS, 0))
        self._windows[kind] = ends, count + 1
        return count < MAX_LINES

    def over(self, now: float) -> Iterator[tuple[Kind, int]]:
        """Forget windows that have ended: their kinds, and how many lines were left out where some were."""
        while self._windows:
            kind, (ends, count) = next(iter(self._windows.items()))
            if ends > now:
                return
            del self._windows[kind]
            if count > MAX_LINES:
                yield kind, count - MAX_LINES


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes log records, few of one kind."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.setFormatter(JsonLines())
        self._clock = clock
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, if there were not too many like it and there is memory for it."""
        with contextlib.suppress(MemoryError):  # what it tells of matters more than the line
            now = self._clock()
            self._tell(now)
            kind = _kind(record)
            if kind is None or self._repeats.admits(kind, now):
                super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Tell what was wrong with a record, unless it was lack of memory."""
        if not isinstance(sys.exc_info()[1], MemoryError):
            super().handleError(record)

    def tell(self, *, at_once: bool = False) -> None:
        """Tell what was left out in minutes that are over, or ``at_once`` in this one too."""
        self.acquire()
        try:
            self._tell(float("inf") if at_once else self._clock())
        finally:
            self.release()

    def close(self) -> None:
        """Tell all that was left out."""
        self.tell(at_once=True)
        super().close()

    def _tell(self, now: float) -> None:
        for kind, count in self._repeats.over(now):
            fields = {name: text for name, text in zip(_KIND, kind, strict=True) if text}
            super().emit(_record(logging.INFO, "lines left out", **fields, left_out=count))


def _record(level: int, event: str, **fields: object) -> logging.LogRecord:
    named = {"name": "hapi.server", "levelno": level, "levelname": logging.getLevelName(level), "msg": event}
    return logging.makeLogRecord({**named, **fields})


def dropped_line(count: int) -> str:
    """Return the line about ``count`` lines of the log that were dropped, since nobody read it."""
    return JsonLines().format(_record(logging.WARNING, "log not read: lines dropped", dropped=count)) + "\n"


def dropped_lines() -> int:
    """Return how many lines of the log were dropped so far."""
    handlers = logging.getLogger().handlers
    streams = {id(h.stream): h.stream for h in handlers if isinstance(h, LimitedHandler)}
    return sum(s.dropped for s in streams.values() if isinstance(s, UnwaitingStream))


def tell_left_out(*, at_once: bool = False) -> None:
    """Log the numbers of lines that were left out; call it now and then, also while nothing is logged, and at
    the end.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LimitedHandler):
            handler.tell(at_once=at_once)


def _kind(record: logging.LogRecord) -> Kind | None:
    """Kind of a line, by which similar ones are counted; None for lines that are never left out."""
    fields = vars(record)
    event = str(record.msg).partition("\n")[0][:120]
    if event == REQUEST and int(fields.get("status", 0)) < 400:
        return None
    error, audited, tenant = (str(fields.get(name, ""))[:80] for name in _KIND[1:])
    return event, error, audited, tenant
