"""Every number of every command has bounds: absurd ones are told in one line, before anything is begun."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import pytest

from benchmarks.cli.bench import configure as configure_benchmarks
from hapi.cli import main, server, train
from hapi.cli.shared.numbers import Number
from hapi.config.fields import SettingField, every_field, flag_of, members
from hapi.config.settings import load, overrides_of
from hapi.errors import UsageError
from hapi.process.free_memory import host_memory
from hapi.server.settings import ServerSettings
from hapi.train.settings import GROUPS, TrainSettings

ABSURD = (
    "9" * 30, "1" + "0" * 5000, "-1", "-0.5", "nan", "inf", "-inf", "", " ", "1e400", "1e99", "0x10", "1_", "--", "1,2",
    "٣", "½", "1\x00", "\x1b[31m", "many", "1 parsec", "99999999999TB",
)  # fmt: skip
"""Huge, negative, no numbers, empty; none of them is a value of any numeric flag."""
COMMANDS = {"hapi-train": (train.parser(), TrainSettings), "hapi-server": (server.parser(), ServerSettings)}
NUMERIC = {"N", "X", "F", "SIZE", "BYTES", "SECONDS", "TIME", "RATE", "SAMPLES", "Kx"}
"""What the help calls a number."""


def actions() -> Iterator[tuple[str, argparse.Action]]:
    """(command, action) of all parsers but those of hapi-train and hapi-server, whose settings have rules."""
    benches = argparse.ArgumentParser(prog="benchmarks")
    configure_benchmarks(benches)
    tops = [benches, *(main.parser_with(name) for name in main.COMMANDS)]
    seen = set()
    while tops:
        parser = tops.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                tops.extend(action.choices.values())
            elif action.option_strings and (parser.prog, action.dest) not in seen:
                seen.add((parser.prog, action.dest))
                yield parser.prog, action


def is_numeric(action: argparse.Action) -> bool:
    metavars = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
    return isinstance(action.type, Number) or bool(NUMERIC & set(metavars)) or action.type in (int, float)


@pytest.mark.slow
def test_every_number_of_a_command_has_bounds() -> None:
    numeric = [(prog, action) for prog, action in actions() if is_numeric(action)]
    assert len(numeric) > 80
    for prog, action in numeric:
        assert isinstance(action.type, Number), f"{prog} {action.option_strings[0]}: has no bounds"
        if isinstance(action.default, str):
            action.type(action.default)
        for text in ABSURD if action.type.low >= 0 else set(ABSURD) - {"-1", "-0.5"}:
            with pytest.raises(argparse.ArgumentTypeError) as refused:
                print(prog, action.option_strings, action.type(text))
            line = str(refused.value)
            assert len(line) < 300 and line.isprintable() and action.type.expected in line, (prog, line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--threads", "99999"),
            "hapi-server: error: --threads: expected a number from 1 to 1024, got '99999'",
        ),
        (
            ("--chunk-cache", "999TB"),
            f"hapi-server: error: --chunk-cache: expected a number from 0 to {host_memory()}, got '999TB'",
        ),
        (("--port", "nan"), "hapi-server: error: --port: "),
        (("--port", "-1"), "hapi-server: error: --port: expected a number from 0 to 65535, got '-1'"),
        (("--drain-seconds", "-1s"), "hapi-server: error: --drain-seconds: "),
        (("--chunk-cache", "-5GB"), "hapi-server: error: --chunk-cache: "),
    ],
)
def test_it_is_one_line(arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main(["--store", "x", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1
    assert host_memory() > 1 << 28


def numbers() -> Iterator[tuple[str, SettingField]]:
    for command, (_, kind) in COMMANDS.items():
        yield from ((command, f) for f in every_field(kind) if {int, float} & set(_plain(f.annotation)))


def _plain(annotation: object) -> Iterator[object]:
    """The kinds of a field, those of a tuple's elements included."""
    for kind in members(annotation):
        inner = getattr(kind, "__args__", ())
        yield from inner or (kind,)


@pytest.mark.parametrize(("command", "field"), [pytest.param(c, f, id=f"{c}-{f.name}") for c, f in numbers()])
def test_every_number_of_the_settings_has_bounds(command: str, field: SettingField) -> None:
    parser, kind = COMMANDS[command]
    takes_text = str in set(_plain(field.annotation))  # a layer's name, or a dataset's: looked up later
    if not takes_text:
        rule = field.rule
        assert rule.high is not None and (rule.low is not None or rule.above is not None), field.name
        assert field.default in (None, ()) or all(
            rule.holds(v) for v in (field.default if isinstance(field.default, tuple) else (field.default,))
        )
    for text in ("", " ") if takes_text else (t for t in ABSURD if t != "1,2"):
        arguments = parser.parse_args([f"{flag_of(field.name)}={text}"])
        with pytest.raises(UsageError) as refused:
            print(load(kind, None, overrides_of(arguments, kind), {"HAPI_STORE": "x"}).value)
        line = str(refused.value)
        assert line.startswith(flag_of(field.name)) and len(line) < 300 and line.isprintable(), line


def test_an_empty_text_is_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's variable that is not set is no way to train without a checkpoint, or on another server."""
    for flag, text in itertools.product(
        ("--checkpoint", "--cache-dir", "--server", "--store", "--report"), ("", " ")
    ):
        assert train.main([flag, text]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"hapi-train: error: {flag}: the text is empty; give a value"), line
        assert line.count("\n") == 1


def test_the_help_of_the_trainer_has_every_setting() -> None:
    below = [f.name for kind in GROUPS.values() for f in every_field(kind)]
    assert sorted(below) == sorted(f.name for f in every_field(TrainSettings))
    assert len(below) == len(set(below)), "two groups have a setting of one name"


@pytest.mark.parametrize("command", ["hapi-train", "hapi-server"])
def test_every_setting_has_a_variable(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = {"hapi-train": train, "hapi-server": server}[command]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(f"{module.VARIABLES}THREADS", "0")
        environment.setenv("HAPI_STORE", "x")
        assert module.main([]) == 2
    line = capsys.readouterr().err
    assert line == f"{command}: error: {module.VARIABLES}THREADS: expected a number from 1 to 1024, got '0'\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_of_a_flag_is_named_for_what_it_is(command: str) -> None:
    """A file, a folder, a name: not any text."""
    for action in COMMANDS[command][0]._actions:
        if action.option_strings and action.nargs != 0:
            assert "TEXT" not in str(action.metavar), action.option_strings
