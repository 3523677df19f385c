"""``hapi layers MODEL``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from hapi.cli.models.origin import configure_allowed
from hapi.cli.models.push import configure_shape, input_shape_of, spec_of
from hapi.errors import UsageError
from hapi.factories import check_allowed, search_here
from hapi.store.open import open_store, split_model_address
from hapi.text import counted, printable

if TYPE_CHECKING:
    from hapi.models.graph.layers import LayeredModel

_STORE = "store:"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a torchvision name, transformer (vit_b_16), timm:NAME, package.module:factory, "
        "or store:STORE/NAME for a pushed model",
    )
    configure_shape(parser)
    configure_allowed(parser, "a model factory that a pushed model may name")
    parser.add_argument(
        "--all-cuts", action="store_true", help="every cut point, not the paper's list or the blocks"
    )
    parser.add_argument(
        "--relatives",
        metavar="STORE",
        help="also list the pushed models of a store whose first layers have the same structure",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the layers. No weights are downloaded or made."""
    model = _structure(args)
    if args.all_cuts:
        model = model.with_all_cuts()
    found = _relatives(model, args.relatives) if args.relatives is not None else {}
    if args.json:
        document: dict[str, Any] = {"default_freeze": model.default_freeze, "layers": _rows(model)}
        if args.relatives is not None:
            document["relatives"] = found
        print(json.dumps(document, indent=1))
        return 0
    _print(model, args.model)
    for reference, count in found.items():
        print(f"{printable(reference)} has its first {counted(count, 'layer')}")
    return 0


def _relatives(model: LayeredModel, url: str) -> dict[str, int]:
    """Number of the first layers that pushed models of a store have, too, by NAME@VERSION; most come first."""
    from hapi.repository.relatives import relatives_of

    store = open_store(url)
    store.ping()
    # Weights are unknown, and say nothing about the structure.
    model.expected_digests = {**dict.fromkeys(model.tensors.names(), "0" * 32), **model.expected_digests}
    return {found.reference: found.same_structure for found in relatives_of(store, model.identities())}


def _structure(args: argparse.Namespace) -> LayeredModel:
    if not args.model.startswith(_STORE):
        spec = spec_of(args, "random:0")
        from hapi.models.zoo.build import structure

        return structure(spec, allow_import=True)
    if args.blocks:
        raise UsageError("a pushed model has the blocks it was pushed with; leave --blocks out")
    input_shape = input_shape_of(args)
    url, name = split_model_address(args.model.removeprefix(_STORE))
    from hapi.repository.opening import open_model  # brings torch

    stored = open_model(open_store(url), name)
    check_allowed(stored.spec.architecture, args.allow_model, name)
    if args.allow_model:
        search_here()
    return stored.layered(input_shape=input_shape, allow_import=args.allow_model)


def _rows(model: LayeredModel) -> list[dict[str, Any]]:
    return [
        {
            "index": layer.index,
            "name": layer.name,
            "shape": list(layer.output_shape),
            "bytes": layer.output_bytes,
            "parameters": layer.parameter_count,
        }
        for layer in model.layers
    ]


def _print(model: LayeredModel, title: str) -> None:
    rows = _rows(model)
    whole = model.output_bytes()[0]
    shape = "x".join(str(side) for side in model.input_shape)
    print(
        f"{printable(title)}: {counted(len(rows), 'layer')}, input {shape} = {whole / 1e3:.1f} kB a sample (float32)"
    )
    header = ["LAYER", "NAME", "OUTPUT", "KB/SAMPLE", "OF INPUT", "PARAMETERS", ""]
    table = [header]
    for row in rows:
        table.append(
            [
                str(row["index"]),
                printable(row["name"]),
                "x".join(str(side) for side in row["shape"]),
                f"{row['bytes'] / 1e3:.1f}",
                f"{row['bytes'] / whole:.2f}",
                f"{row['parameters']:,}" if row["parameters"] else "-",
                "<- default freeze" if row["index"] == model.default_freeze else "",
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        cells = [
            cell.ljust(width) if column in (1, 2, 6) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
