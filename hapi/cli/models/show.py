"""``hapi show STORE/NAME``: a pushed model's layers, and the models that share its first ones."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from hapi.cli.shared.common import EXIT_OK, say
from hapi.store.open import open_store, split_model_address
from hapi.text import printable
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.repository.manifest import ModelManifest
    from hapi.repository.relatives import Relative


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="STORE/NAME", help="the model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the manifest tells. No weights are read, and none of the model's code is imported."""
    from hapi.repository.opening import open_model
    from hapi.repository.relatives import relatives  # brings torch

    url, name = split_model_address(args.model)
    store = open_store(url)
    manifest = open_model(store, name).manifest
    found = relatives(store, manifest)
    if args.json:
        print(json.dumps(_document(manifest, found), indent=1))
        return EXIT_OK
    _print(manifest, found)
    return EXIT_OK


def _document(manifest: ModelManifest, found: list[Relative]) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "version": manifest.version,
        "created": manifest.created,
        "parent": manifest.parent,
        "architecture": None if manifest.spec is None else manifest.spec.architecture,
        "digest": manifest.digest,
        "bytes": manifest.nbytes,
        "classes": manifest.classes,
        "default_freeze": manifest.default_freeze,
        "layers": [_row(manifest, number) for number in range(1, len(manifest.layers) + 1)],
        "relatives": [relative.to_json() for relative in found],
    }


def _architecture(manifest: ModelManifest) -> str:
    return "tensors only" if manifest.spec is None else manifest.spec.architecture


def _row(manifest: ModelManifest, number: int) -> dict[str, Any]:
    layer, identity = manifest.layers[number - 1], manifest.identities[number]
    return {
        "index": number,
        "name": layer.name,
        "shape": list(layer.shape),
        "tensors": len(layer.tensors),
        "bytes": sum(manifest.tensors[name].nbytes for name in layer.tensors),
        "structure": identity.structure,
        "content": identity.content,
    }


def _print(manifest: ModelManifest, found: list[Relative]) -> None:
    classes = "" if manifest.classes is None else f", {manifest.classes} classes"
    say(
        f"{printable(manifest.reference)}: {printable(_architecture(manifest))}, {len(manifest.layers)} layers, "
        f"{len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)}{classes}"
    )
    table = [["LAYER", "NAME", "OUTPUT", "TENSORS", "SIZE", "IDENTITY", ""]]
    for number in range(1, len(manifest.layers) + 1):
        row = _row(manifest, number)
        table.append(
            [
                str(number),
                printable(row["name"]),
                "x".join(map(str, row["shape"])),
                str(row["tensors"]) if row["tensors"] else "-",
                format_bytes(row["bytes"]) if row["bytes"] else "-",
                row["content"][:12],
                "<- default freeze" if number == manifest.default_freeze else "",
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for relative in found:
        say(
            f"{printable(relative.name)} has its first {relative.same_structure} layers, {relative.same_weights} with "
            "the same weights"
        )
