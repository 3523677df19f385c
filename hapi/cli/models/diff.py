"""``hapi diff STORE/NAME STORE/NAME``: the layers in which two pushed models differ."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from hapi.cli.shared.common import EXIT_OK, say
from hapi.repository.side_files import FILES_LAYER
from hapi.store.open import open_store, split_model_address
from hapi.text import printable
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.repository.difference import Difference, LayerChange
    from hapi.repository.manifest import ModelManifest

_SHOWN = 3
"""Tensors that a line names."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    for which in ("first", "second"):
        parser.add_argument(which, metavar="STORE/NAME", help=f"the {which} model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the models share, then a line for each layer that differs by itself. No weights are read."""
    from hapi.repository.difference import compare  # brings torch

    found = compare(_manifest(args.first), _manifest(args.second))
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
        return EXIT_OK
    say(_summary(args.first, args.second, found))
    for change in found.changes:
        say(_line(change))
    return EXIT_OK


def _manifest(address: str) -> ModelManifest:
    from hapi.repository.opening import open_model

    url, name = split_model_address(address)
    return open_model(open_store(url), name).manifest


def _summary(first: str, second: str, found: Difference) -> str:
    names = f"{printable(first)} and {printable(second)}"
    if found.same:
        return f"{names}: the same model"
    of = f"of {found.layers[0]} and {found.layers[1]} layers"
    return f"{names}: {of} the first {found.same_structure} are the same, {found.same_weights} with their weights"


def _line(change: LayerChange) -> str:
    line = f"  {change.layer} {printable(change.name)}: {change.change}"
    if change.name == FILES_LAYER and change.change in ("weights", "tensors"):
        line = f"  {change.layer} {printable(change.name)}: other files"
    elif change.change == "weights":
        line = f"  {change.layer} {printable(change.name)}: other weights"
    elif change.change in ("tensors", "operations"):
        line = f"  {change.layer} {printable(change.name)}: other {change.change}"
    if not change.tensors:
        return line
    shown = ", ".join(map(printable, change.tensors[:_SHOWN]))
    more = f" and {len(change.tensors) - _SHOWN} more" if len(change.tensors) > _SHOWN else ""
    return f"{line} ({shown}{more}; {format_bytes(change.nbytes)})"
