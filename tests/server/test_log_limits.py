"""Repeated lines of the log are limited, and none is lost without being counted."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage, InvalidHeader

from hapi.server.lifecycle import log_limits
from hapi.server.lifecycle.log_limits import MAX_KINDS, MAX_LINES, WINDOW_SECONDS, LimitedHandler


class Log:
    """A logger of its own with a limited handler, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = LimitedHandler(self.stream, lambda: self.now)
        self.logger = logging.Logger("limited")
        self.logger.addHandler(self.handler)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


def test_few_of_a_kind_and_the_number_of_the_others(log: Log) -> None:
    for number in range(100):
        log.logger.error("it happened %d", number)
    log.logger.error(
        "something else", extra={"_private": 1}
    )  # as libraries leave some that are nobody's business
    assert [line["event"] for line in log.lines()] == [
        *(f"it happened {n}" for n in range(MAX_LINES)),
        "something else",
    ]
    assert "_private" not in log.lines()[-1]
    log.now = WINDOW_SECONDS
    log.handler.tell()
    assert log.lines()[-1] | {"time": ""} == {
        "time": "", "level": "info", "event": "lines left out", "of": "it happened %d", "left_out": 100 - MAX_LINES
    }  # fmt: skip
    log.logger.error("it happened %d", 100)
    assert log.lines()[-1]["event"] == "it happened 100"


def test_what_was_left_out_is_told_at_the_end(log: Log) -> None:
    for _ in range(MAX_LINES + 5):
        log.logger.info("again")
    log.handler.close()
    assert log.lines()[-1]["left_out"] == 5


def test_requests_that_went_well_are_all_there(log: Log) -> None:
    for number in range(100):
        log.logger.info("request", extra={"status": 200, "number": number})
    for status, tenant in ((401, ""), (422, "vision"), (422, "speech")):
        for _ in range(100):
            log.logger.info("request", extra={"status": status, "error": str(status), "tenant": tenant})
    assert len(log.lines()) == 100 + 3 * MAX_LINES
    log.now = WINDOW_SECONDS
    log.handler.tell()
    told = [(line["error"], line.get("tenant"), line["left_out"]) for line in log.lines()[-3:]]
    assert told == [("401", None, 70), ("422", "vision", 70), ("422", "speech", 70)]


def test_kinds_are_bounded(log: Log) -> None:
    for number in range(3 * MAX_KINDS):
        log.logger.info(f"kind {number}")
    assert len(log.lines()) == MAX_KINDS + MAX_LINES
    log.now = WINDOW_SECONDS
    log.handler.tell()
    assert log.lines()[-1]["left_out"] == 2 * MAX_KINDS - MAX_LINES


def test_asyncio_without_descriptors(log: Log) -> None:
    """Its message has other numbers each time, and a traceback."""
    for number in range(1000):
        try:
            raise OSError(24, "Too many open files")
        except OSError:
            log.logger.exception(f"socket.accept() out of system resource\nsocket: <socket {number}>")
    assert len(log.stream.getvalue()) < 1000 * MAX_LINES


def test_bytes_of_requests_are_not_quoted(log: Log) -> None:
    try:
        try:
            raise InvalidHeader("Authorization : Bearer secret")
        except BadHttpMessage as error:
            raise RuntimeError("outer") from error
    except RuntimeError:
        log.logger.exception("failed")
    assert "secret" not in log.stream.getvalue()
    assert log.lines()[0]["exception"].startswith("InvalidHeader ")


def test_all_limited_handlers_are_asked(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [log.handler, logging.NullHandler()])
    for _ in range(MAX_LINES + 1):
        log.logger.info("again")
    log.now = WINDOW_SECONDS
    log_limits.tell_left_out()
    assert log.lines()[-1]["left_out"] == 1
