"""Structured logs: one line per record, extra fields kept, no forged lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from hapi.logs import configure_logging


@pytest.fixture(autouse=True)
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_carry_the_extra_fields() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    log = logging.getLogger("hapi.server")
    log.debug("not shown")
    log.info("request %s\nforged", "r1", extra={"samples": 16, "name_of": {"a"}})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["level"], first["message"], first["samples"]) == ("info", "request r1\nforged", 16)
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken" in second["exception"]


def test_text_lines_cannot_be_forged() -> None:
    stream = io.StringIO()
    configure_logging("text", "warning", stream)
    logging.getLogger("hapi").warning("bad name 'x\nINFO all is well'", extra={"status": "4\r00"})
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().endswith("status=4 00\n")
