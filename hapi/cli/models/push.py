"""``hapi push MODEL STORE/NAME``: a model's weights, or a fine-tuned network, into a store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hapi.cli.shared.common import say
from hapi.cli.shared.numbers import count
from hapi.cli.shared.writing import configure_lock, lasting_store
from hapi.factories import is_factory, search_here
from hapi.models.zoo.names import MAX_CLASSES, MAX_SIDE, check_model, check_weights, is_file
from hapi.store.open import split_address

if TYPE_CHECKING:
    from hapi.models.zoo.build import ModelSpec

_SHARED_HELP = "a torchvision name, transformer (vit_b_16), timm:NAME, or package.module:factory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{_SHARED_HELP}, or a model file of a training (.safetensors) with its own input size and blocks",
    )
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/resnet50 or s3://bucket/resnet50"
    )
    parser.add_argument(
        "--weights",
        metavar="WEIGHTS",
        help="random[:SEED], a name of the library's weights (DEFAULT, IMAGENET1K_V1), or a local .safetensors or "
        ".pth file (default: DEFAULT, and random for package.module:factory)",
    )
    parser.add_argument(
        "--num-classes",
        type=count(1, MAX_CLASSES),
        metavar="N",
        help="give the head N classes (default: as it is)",
    )
    configure_shape(parser)
    parser.add_argument("--replace", action="store_true", help="replace the model of this name")
    configure_lock(parser)


def configure_shape(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that decide the list of layers: the input's size and the blocks."""
    parser.add_argument(
        "--input-size",
        type=count(1, MAX_SIDE),
        metavar="N",
        help="side of the square RGB input (default 224)",
    )
    parser.add_argument(
        "--blocks",
        metavar="A,B,...",
        help="module paths or layer names at which layers end, in order; needed for a model that cannot be traced",
    )


def spec_of(args: argparse.Namespace, weights: str, num_classes: int | None = None) -> ModelSpec:
    """Return the model that the arguments describe. A user's own factory is also searched in the current
    folder.
    """
    if is_factory(args.model):
        search_here()
    check_model(args.model)
    from hapi.models.zoo.build import ModelSpec  # brings torch, after what can be told without

    return ModelSpec(
        architecture=args.model,
        num_classes=num_classes,
        weights=weights,
        input_shape=input_shape_of(args),
        blocks=blocks_of(args),
    )


def blocks_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names at which layers end, from ``--blocks``."""
    return tuple(part.strip() for part in (args.blocks or "").split(",") if part.strip())


def input_shape_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of one sample."""
    side = args.input_size or 224
    return 3, side, side


def run(args: argparse.Namespace) -> int:
    """Build the model, write it into the store, and print a summary."""
    store_url, name = split_address(args.address)
    store = lasting_store(store_url)
    if is_factory(args.model) or is_file(args.model):
        search_here()
    if not is_file(args.model):
        check_model(args.model)
        check_weights(args.model, args.weights or "auto")
    from hapi.api.models import push  # brings torch, after what can be told without

    pushed = push(
        args.model,
        args.address,
        weights=args.weights,
        num_classes=args.num_classes,
        input_size=args.input_size,
        blocks=blocks_of(args),
        replace=args.replace,
        force_lock=args.force_lock,
    )
    manifest = pushed.manifest
    size = f"{manifest.nbytes / 1e6:.1f} MB"
    classes = f", {manifest.classes} classes" if manifest.classes else ""
    layers = f"{len(manifest.layers)} layers"
    say(f"pushed {manifest.spec.architecture} as {name!r} into {store.url}: {layers}, {size}{classes}")
    architecture = manifest.spec.architecture
    allowed = f" --allow-model {architecture}" if is_factory(architecture) else ""
    say(f"digest {pushed.digest}; train with: hapi-train --model store:{name}{allowed}")
    return 0
