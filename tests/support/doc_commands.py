"""Commands that documents show, and what the real command lines say to them."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hapi
from hapi.cli.shared.common import OneLineParser
from hapi.config.settings import load, overrides_of
from hapi.errors import HapiError
from hapi.train.settings import TrainSettings

ROOT = Path(hapi.__file__).parents[1]
_SHELL = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)([^`]+?)\1(?!`)", re.DOTALL)
_PROGRAM = re.compile(
    r"(?:\./)?(?:hapi(?:-[a-z]+)?|scripts/[a-z-]+|\.ci/run|python -m (?:hapi|benchmarks))(?=\s|$)"
)
_PLACEHOLDER = re.compile(r"'[A-Z][A-Z/.]*'")


def shell_commands(text: str) -> Iterator[str]:
    """Commands of the fenced shell blocks of Markdown ``text``, one of ours each; pipes and lists are taken apart."""
    for block in _SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            plain = line.strip().removeprefix("$ ").replace('eval "$(', "").replace(')"', "")
            for part in re.split(r"\s(?:\|\||&&|[|;&])(?:\s|$)", _without_comment(plain)):
                command = re.sub(r"^(?:[A-Z_]+=\S*\s+)+", "", part.strip())
                if _PROGRAM.match(command):
                    yield command


def named_commands(text: str) -> Iterator[str]:
    """Commands that stand in backticks within a sentence, also unfinished ones."""
    for _, span in _SPAN.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        command = " ".join(span.split())
        if _PROGRAM.match(command):
            yield command


def named_flags(text: str) -> Iterator[str]:
    """Flags at the beginning of what stands in backticks."""
    for _, span in _SPAN.findall(text):
        yield from re.findall(r"^--[a-z][a-z0-9-]*", span.strip())


def mistake(command: str, *, whole: bool) -> str | None:
    """What the program's own parser says against ``command``; None when it would begin.

    ``whole``: it is complete. Otherwise arguments may be missing, and stand as ``NAME`` or ``...``.
    """
    words = shlex.split(command.replace("[", " ").replace("]", " ") if not whole else command)
    words = [word for word in words if whole or word not in ("...", "…")]
    if words[0].removeprefix("./").startswith(("scripts/", ".ci/")):
        return _script_mistake(words)
    if words[0] == "python":
        words = [" ".join(words[:3]), *words[3:]]
    if words[0] == "hapi" and words[1:2] in (["train"], ["server"]):  # other names of the programs
        words = [f"hapi-{words[1]}", *words[2:]]
    try:
        parser = parser_of(words[0], words[1:])
    except KeyError:
        return f"no command {words[0]}"
    if len(words) == 1 and not whole:
        return None
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = parser.parse_args(words[1:])
            if whole and words[0] == "hapi-train":
                load(TrainSettings, args.experiment, overrides_of(args, TrainSettings), {})
        except SystemExit as ended:
            return (
                None if ended.code == 0 or (not whole and _unfinished(said.getvalue())) else said.getvalue()
            )
        except HapiError as error:
            return str(error)
    return None


def parser_of(program: str, arguments: list[str]) -> argparse.ArgumentParser:
    """The argument parser of ``program``, with the flags of the sub-command that ``arguments`` name."""
    if program in ("hapi", "python -m hapi"):
        from hapi.cli.main import parser_with

        return parser_with(next((word for word in arguments if not word.startswith("-")), None))
    return _parsers()[program]


@cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    from benchmarks.cli.bench import configure
    from hapi.cli import server, train

    benchmarks = OneLineParser(prog="python -m benchmarks")
    configure(benchmarks)
    return {
        "hapi-server": server.parser(), "hapi-train": train.parser(), "python -m benchmarks": benchmarks
    }  # fmt: skip


@cache
def known_flags() -> frozenset[str]:
    """The flags of all commands, benchmarks and scripts."""
    from hapi.cli.main import COMMANDS, parser_with

    parsers = [*_parsers().values(), *(parser_with(name) for name in COMMANDS)]
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").iterdir())
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", scripts)).union(*map(_flags, parsers))


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*(_flags(sub) for sub in action.choices.values()))
    return found


def _script_mistake(words: list[str]) -> str | None:
    path = ROOT / words[0]
    if not path.is_file():
        return f"no script {words[0]}"
    text = path.read_text(encoding="utf-8")
    wanted = [word for word in words[1:] if re.fullmatch(r"--[a-z-]+|[a-z]+", word)]
    unknown = [word for word in wanted if not re.search(rf"(?<![\w-]){word}(?![\w-])", text)]
    return f"{words[0]} does not know {', '.join(unknown)}" if unknown else None


def _unfinished(message: str) -> bool:
    """Whether the parser only misses something, or got a placeholder for it."""
    return bool(
        re.search("arguments are required|expected (?:one|at least one) argument", message)
        or _PLACEHOLDER.search(message)
    )


def _without_comment(line: str) -> str:
    return re.sub(r"(?:^|\s)#(?:\s.*|$)", "", line)
