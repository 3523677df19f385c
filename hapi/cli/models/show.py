"""``hapi show STORE/NAME|FILE|FOLDER``: layers of a pushed model, maybe with its relatives, or of a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from hapi.cli.shared.common import EXIT_OK, say, tell
from hapi.errors import HapiError, UsageError
from hapi.models.zoo.names import FILE_SUFFIXES
from hapi.paths import is_folder
from hapi.repository.packs.lost import problem_of_packs
from hapi.repository.side_files import side_files_of
from hapi.repository.versions import list_versions
from hapi.store.open import open_store, split_address, split_model_address
from hapi.text import counted, printable
from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.repository.manifest import ModelManifest
    from hapi.repository.relatives import Relative


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a pushed model, STORE/NAME, or a checkpoint: a .safetensors, .pth, .pt, .bin, .ckpt or .pth.tar file, "
        "an index.json, or a folder with one of them",
    )
    parser.add_argument(
        "--relatives",
        action="store_true",
        help="also list the models that share its first layers; reads the description of each version in the store",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what manifest or headers tell. No weights are read, and none of the model's code is imported."""
    if _is_checkpoint(args.model):
        if args.relatives:
            raise UsageError(
                f"--relatives: {args.model} is a checkpoint that no store has; push it, and give STORE/NAME"
            )
        return _show_checkpoint(args)
    from hapi.repository.opening import open_model
    from hapi.repository.relatives import relatives  # brings torch

    url, name = split_model_address(args.model)
    store = open_store(url)
    manifest = open_model(store, name).manifest
    found = relatives(store, manifest) if args.relatives else None
    needed = ((entry.pack, entry.stop) for entry in manifest.tensors.values())
    problem = problem_of_packs(store, needed, {})
    if args.json:
        print(json.dumps({**_document(manifest, found), "problem": problem}, indent=1))
        return EXIT_OK
    _print(manifest, found or [])
    if problem is not None:
        tell("hapi show", f"{printable(manifest.reference)}: {problem}")
    return EXIT_OK


def _is_checkpoint(text: str) -> bool:
    """Return whether ``text`` names a checkpoint on this machine; a pushed model of the same name goes first."""
    if "://" in text or not (text.endswith(FILE_SUFFIXES) or is_folder(text)):
        return False
    return text.endswith(FILE_SUFFIXES) or not _is_pushed(text)


def _is_pushed(address: str) -> bool:
    try:
        url, name = split_address(address)
        return bool(list_versions(open_store(url), name))
    except HapiError:
        return False


def _show_checkpoint(args: argparse.Namespace) -> int:
    from hapi.repository.sources.open import open_source  # brings torch

    source = open_source(args.model)
    rows: list[dict[str, Any]] = [
        {"index": number, "name": name, "tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)}
        for number, (name, tensors) in enumerate(source.layers(), start=1)
    ]
    if args.json:
        tensors = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in source.tensors.values()
        ]
        facts = {"path": str(source.path), "form": source.form, "files": source.files, "bytes": source.nbytes}
        print(json.dumps({**facts, "layers": rows, "tensors": tensors}, indent=1))
        return EXIT_OK
    files = "" if source.files == 1 else f" in {source.files} files"
    say(
        f"{source.path}: {source.form}{files}, {counted(len(rows), 'layer')}, "
        f"{counted(len(source.tensors), 'tensor')}, {format_bytes(source.nbytes)}"
    )
    table = [["LAYER", "NAME", "TENSORS", "SIZE", "TYPE"]]
    for row, (_, held) in zip(rows, source.layers(), strict=True):
        types = ",".join(dict.fromkeys(tensor.dtype for tensor in held))
        table.append(
            [
                str(row["index"]),
                printable(row["name"]),
                str(row["tensors"]),
                format_bytes(row["bytes"]),
                types,
            ]
        )
    _print_table(table)
    for note in source.notes:
        tell("hapi show", note)
    return EXIT_OK


def _document(manifest: ModelManifest, found: list[Relative] | None) -> dict[str, Any]:
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
        "card": manifest.card,
        "files": {name: entry.nbytes for name, entry in side_files_of(manifest).items()},
        "layers": _rows(manifest),
        "relatives": None if found is None else [relative.to_json() for relative in found],
    }


def _architecture(manifest: ModelManifest) -> str:
    return "tensors only" if manifest.spec is None else manifest.spec.architecture


def _rows(manifest: ModelManifest) -> list[dict[str, Any]]:
    """The layers in their order, a table for each; some models have a hundred thousand."""
    return [
        {
            "index": number,
            "name": layer.name,
            "shape": list(layer.shape),
            "tensors": len(layer.tensors),
            "bytes": sum(manifest.tensors[name].nbytes for name in layer.tensors),
            "structure": identity.structure,
            "content": identity.content,
        }
        for number, (layer, identity) in enumerate(
            zip(manifest.layers, manifest.identities[1:], strict=True), start=1
        )
    ]


def _print(manifest: ModelManifest, found: list[Relative]) -> None:
    classes = "" if manifest.classes is None else f", {counted(manifest.classes, 'class')}"
    say(
        f"{printable(manifest.reference)}: {printable(_architecture(manifest))}, "
        f"{counted(len(manifest.layers), 'layer')}, {counted(len(manifest.tensors), 'tensor')}, "
        f"{format_bytes(manifest.nbytes)}{classes}"
    )
    if manifest.parent is not None:
        say(f"fine-tuned from {printable(manifest.parent)}{_training(manifest)}")
    table = [["LAYER", "NAME", "OUTPUT", "TENSORS", "SIZE", "IDENTITY", ""]]
    for row in _rows(manifest):
        table.append(
            [
                str(row["index"]),
                printable(row["name"]),
                "x".join(map(str, row["shape"])),
                str(row["tensors"]) if row["tensors"] else "-",
                format_bytes(row["bytes"]) if row["bytes"] else "-",
                row["content"][:12],
                "<- default freeze" if row["index"] == manifest.default_freeze else "",
            ]
        )
    _print_table(table)
    files = side_files_of(manifest)
    if files:
        said = (f"{printable(name)} ({format_bytes(entry.nbytes)})" for name, entry in files.items())
        say(f"files beside the tensors: {', '.join(said)}")
    for relative in found:
        say(
            f"{printable(relative.reference)} has its first {counted(relative.same_structure, 'layer')}, "
            f"{relative.same_weights} with the same weights"
        )


def _training(manifest: ModelManifest) -> str:
    """Line on the training that the pushed model file tells of."""
    card = manifest.card or {}
    layers = f" behind layer {card['freeze']}" if isinstance(card.get("freeze"), int) else ""
    dataset = card.get("dataset")
    return layers + (f", on {printable(str(dataset.get('name')))}" if isinstance(dataset, dict) else "")


def _print_table(table: list[list[str]]) -> None:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
