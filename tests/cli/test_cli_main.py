"""``hapi``: its help, and wrong sub-commands and flags in one line."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main as benchmarks
from hapi.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_sub_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((command, "--help")) == 0
    assert capsys.readouterr().out.startswith(f"usage: hapi {command} ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("lss", "store"), "hapi: error: there is no command lss; did you mean ls?"),
        (("ls", "--jsn", "store"), "hapi ls: error: unknown argument --jsn; did you mean --json?"),
        (("pack", "--skipbad", "images", "store/x"), "hapi pack: error: unknown argument --skipbad; did you"),
        (("verify",), "hapi verify: error: the following arguments are required: STORE/NAME"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "benchmark",
    [
        "plan",
        "overlap",
        "memory",
        "overload",
        "steps",
        "sweep",
        "batching",
        "reuse",
        "concurrency",
        "tenants",
    ],
)
def test_a_benchmark_of_an_unknown_model_starts_nothing(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks((benchmark, "--model", "resnet19")) == 2
    assert "unknown architecture 'resnet19'; did you mean resnet18" in capsys.readouterr().err
