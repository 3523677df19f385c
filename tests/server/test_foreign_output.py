"""What C libraries print on standard error becomes lines of the log."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hapi.server.lifecycle.foreign_output import LINES_A_MINUTE, LONGEST_LINE, Allowance

PROGRAM = """
import json, logging, os, subprocess, sys, time
from hapi.server.lifecycle.foreign_output import foreign_output_logged
with foreign_output_logged():
    handler = logging.StreamHandler(sys.stderr)
    handler.format = lambda record: json.dumps({"text": getattr(record, "text", "")})
    logging.basicConfig(level="INFO", handlers=[handler])
    {body}
    time.sleep(0.2)
print("after", file=sys.stderr)
"""


def lines_of(body: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{body}", body)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


def texts(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_foreign_lines_are_json() -> None:
    """Those of this process and of one that it starts, without control characters and cut to a length."""
    code, lines = lines_of(
        "os.write(2, b'Corrupt \\x1b[31m JPEG\\n'); subprocess.run(['sh', '-c', 'echo from a child >&2']); "
        "os.write(2, b'x' * 5000); logging.info('own')"
    )
    assert code == 0 and lines[-1] == "after"
    told = [line.get("text", "") for line in texts(lines[:-1])]
    assert any("Corrupt" in text and "\x1b" not in text for text in told)
    assert "from a child" in told
    assert max(map(len, told)) <= LONGEST_LINE + 10 and any(text.startswith("xxx") for text in told)


@pytest.mark.slow
def test_a_flood_neither_fills_the_log_nor_waits() -> None:
    code, lines = lines_of(
        "subprocess.run(['sh', '-c', 'for i in $(seq 20000); do echo warning; done >&2 2>/dev/null'])"
    )
    assert code == 0 and len(lines) <= LINES_A_MINUTE + 1


@pytest.mark.slow
def test_the_last_words_of_a_crash_are_not_lost() -> None:
    code, lines = lines_of("os.abort()")
    assert code != 0 and any("Aborted" in line for line in lines)


def test_an_allowance_is_renewed() -> None:
    allowance = Allowance(2, 60.0)
    assert [allowance.take(now) for now in (5.0, 6.0, 7.0, 8.0)] == [True, True, False, False]
    assert allowance.left_out == 2
    assert allowance.take(66.0)
