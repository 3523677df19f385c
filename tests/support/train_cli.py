"""The command hapi-train, called in this process."""

from __future__ import annotations

import pytest

from hapi.cli import train as command

FAST = (
    "--no-output", "--weights", "random", "--epochs", "1", "--bs", "50", "--threads", "1", "--no-progress",
)  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, the one line on stderr) of a command that does not train."""
    try:
        code = command.main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("hapi-train: error: "), err
    return code, err
