"""``hapi completion SHELL``: what a shell reads to complete the commands and flags of Hapi."""

from __future__ import annotations

import argparse

import shtab

from hapi.cli.shared.common import EXIT_OK

SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL",
        help="bash or zsh: put eval \"$(hapi completion SHELL)\" into the shell's rc file; fish: hapi completion fish "
        "> ~/.config/fish/completions/hapi.fish",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the completions of hapi, hapi-train and hapi-server."""
    from hapi.cli import server, train
    from hapi.cli.main import whole_parser

    for parser in (whole_parser(), train.parser(), server.parser()):
        print(shtab.complete(parser, args.shell))
    return EXIT_OK
