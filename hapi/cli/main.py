"""``hapi``: the sub-commands beside the server and the trainer."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hapi import __version__
from hapi.cli.entry import Leaving
from hapi.cli.shared.common import EXIT_CODES, OneLineParser, run_command

PROGRAMS = {
    "train": "fine-tune a network: another name of hapi-train",
    "server": "run frozen layers beside a store: another name of hapi-server",
}
"""Help lines of the programs that are commands of their own, too."""
GROUPS = {
    "training": {
        "plan": "estimate every split of a training run, and show the choice of each strategy",
        "layers": "print a model's layers, their names, output sizes and the default freeze",
        "report": "make an HTML page of a kept JSON report of a run",
    },
    "trained models": {
        "predict": "name the classes of images, with a model file of a training",
        "evaluate": "compare a model file's outputs with the labels of a dataset",
        "export": "write a model file or checkpoint as safetensors, PyTorch's, ONNX, torch.export's or Hugging Face's",
    },
    "stores": {
        "pack": "turn a folder of images, a torchvision dataset or arrays into a dataset in a store",
        "index": "make a dataset of shards or images that lie in a store already, without a copy",
        "push": "put a model's weights into a store",
        "pull": "write a pushed model, or some of it, into safetensors files",
        "show": "print the layers of a pushed model or a checkpoint, and which models share them",
        "diff": "name the layers in which two pushed models differ",
        "tag": "name a version of a pushed model, or list its versions and tags",
        "ls": "list the datasets and models of a store",
        "verify": "read a whole dataset or pushed model and check every checksum",
        "rm": "take a dataset or a pushed model out of a store",
        "gc": "free what no dataset or model of a store needs: old versions, unused tensors, rests of killed commands",
    },
    "operation": {
        "status": "say what a server does now",
        "cluster": "list the servers of a fleet under Ray Serve",
        "simulate": "simulate a fleet of servers and trainers before it is bought",
        "cache": "list, check or clear the folder in which samples and features are kept (--cache-dir)",
        "completion": "print what bash, zsh or fish reads to complete commands and flags",
    },
}
"""Help lines by name of a sub-command, below the headings of ``hapi --help``. Each has a module of its name, with
``configure`` and ``run``, here or in one of ``FOLDERS``."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
FOLDERS = {
    **dict.fromkeys(
        ("push", "pull", "show", "diff", "tag", "layers", "predict", "evaluate", "export"), "models."
    ),
    **dict.fromkeys(("rm", "gc"), "stores."),
    "plan": "planning.",
}
"""Folder of the modules that are not here."""
WORKING = frozenset(("pack", "index", "push", "pull", "tag", "rm", "gc"))
"""Commands whose work counts even without their output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi``; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in PROGRAMS:
        with Leaving(f"hapi-{arguments[0]}"):
            program_main = importlib.import_module(f"hapi.cli.{arguments[0]}").main
        return int(program_main(arguments[1:]))
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    program = f"hapi {chosen}" if chosen in COMMANDS else "hapi"
    # Importing a command takes seconds of it.
    return run_command(program, lambda: _run(arguments, chosen), goes_on=chosen in WORKING)


def parser_with(chosen: str | None) -> OneLineParser:
    """The command line of ``hapi`` with the flags of the sub-command ``chosen``; the others are only named."""
    parser, commands = _bare_parser()
    for name, summary in (*PROGRAMS.items(), *COMMANDS.items()):
        sub = commands.add_parser(name, description=summary, epilog=EXIT_CODES)
        if name == chosen and name in COMMANDS:
            with Leaving(f"hapi {name}"):
                module_of(name).configure(sub)
    return parser


def whole_parser() -> OneLineParser:
    """The command line of ``hapi`` with the flags of all sub-commands, as shells complete it."""
    parser, commands = _bare_parser()
    for name, summary in PROGRAMS.items():
        program = importlib.import_module(f"hapi.cli.{name}").parser()
        commands.add_parser(name, help=summary, parents=[program], add_help=False)
    for name, summary in COMMANDS.items():
        module_of(name).configure(commands.add_parser(name, help=summary))
    return parser


def _bare_parser() -> tuple[OneLineParser, Any]:
    parser = OneLineParser(
        prog="hapi",
        description="Near-data transfer learning over an object store.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_grouped(),
    )
    parser.add_argument("--version", action="version", version=f"hapi {__version__}")
    return parser, parser.add_subparsers(dest="command", metavar="COMMAND", required=True)


def _grouped() -> str:
    """The commands by their headings, for ``hapi --help``."""
    first, *others = GROUPS
    groups = {first: {**PROGRAMS, **GROUPS[first]}, **{title: GROUPS[title] for title in others}}
    lines = [
        line
        for title, group in groups.items()
        for line in (f"{title}:", *(f"  {name:<12}{summary}" for name, summary in group.items()), "")
    ]
    return "\n".join([*lines, "hapi COMMAND --help says more of each.", EXIT_CODES, ""])


def _run(arguments: Sequence[str], chosen: str | None) -> int:
    parser = parser_with(chosen)
    if chosen is None and not {"-h", "--help", "--version"} & set(arguments):
        what = f"unknown argument {arguments[0]}" if arguments else "a command is missing"
        parser.error(f"{what}; write hapi COMMAND, such as hapi ls STORE")
    if chosen is not None and chosen not in COMMANDS:
        matches = difflib.get_close_matches(chosen, [*PROGRAMS, *COMMANDS], 1, 0.5)
        parser.error(f"there is no command {chosen}" + (f"; did you mean {matches[0]}?" if matches else ""))
    args = parser.parse_args(arguments)
    return int(module_of(args.command).run(args))


def module_of(command: str) -> ModuleType:
    """Import the module of a sub-command."""
    return importlib.import_module(f"hapi.cli.{FOLDERS.get(command, '')}{command}")


if __name__ == "__main__":
    sys.exit(main())
