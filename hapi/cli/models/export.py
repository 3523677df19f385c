"""``hapi export MODEL|CHECKPOINT --output F``: a fine-tuned network in another format."""

from __future__ import annotations

import argparse

from hapi.api.export import FORMATS, export
from hapi.cli.models.origin import configure_model, configure_source, source_of
from hapi.cli.shared.common import EXIT_OK, say
from hapi.factories import search_here
from hapi.paths import check_outputs


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    configure_model(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write; a folder for hf")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), help="default: by the ending of --output (.pth, .onnx, .pt2)"
    )
    configure_source(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file, and say so."""
    search_here()
    if args.format != "hf":
        check_outputs((("--output", args.output),), (("MODEL", args.model),))
    name = export(
        args.model,
        args.output,
        args.format,
        source=source_of(args),
        best=args.best,
        allow_import=args.allow_model,
    )
    say(f"{args.output}: written as {name}")
    return EXIT_OK
