"""Structured logs: one JSON object per line for machines, or one plain line for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every record has; all others came with ``extra=``."""


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", ...}`` on one line; fields of ``extra=`` come along."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({k: v for k, v in vars(record).items() if k not in _STANDARD and k not in entry})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """``12:34:56 info message name=value ...`` on one line (a traceback follows on its own lines)."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line for people."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        extra = "".join(f" {k}={v}" for k, v in vars(record).items() if k not in _STANDARD)
        # What a client sent may be part of the message: it must not be able to forge a line of its own.
        line = " ".join(f"{at} {record.levelname.lower()} {record.getMessage()}{extra}".splitlines())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_logging(
    style: Literal["json", "text"] = "text", level: str = "info", stream: TextIO | None = None
) -> None:
    """Send everything from ``level`` up to ``stream`` (stderr) in ``style``; replaces any earlier set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
