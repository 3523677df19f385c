"""``hapi push MODEL STORE/NAME``: a model's weights, or a fine-tuned network, into a store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hapi.cli.models.origin import configure_allowed
from hapi.cli.shared.common import say, tell
from hapi.cli.shared.numbers import count
from hapi.cli.shared.progress import TransferBar
from hapi.cli.shared.writing import lasting_store
from hapi.errors import BadRequestError, UsageError
from hapi.factories import is_factory, search_here
from hapi.models.zoo.names import MAX_CLASSES, check_model, check_weights, is_checkpoint
from hapi.store.open import split_address
from hapi.text import counted
from hapi.units import format_bytes
from hapi.wire.references import MAX_IMAGE_SIDE, check_tag

if TYPE_CHECKING:
    from hapi.models.zoo.build import ModelSpec
    from hapi.repository.push import Pushed

_SHARED_HELP = "a torchvision name, transformer (vit_b_16), timm:NAME, or package.module:factory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{_SHARED_HELP}, or a model file of a training (.safetensors) with its own input size and blocks, or any "
        "checkpoint, which is pushed as tensors without a network",
    )
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/resnet50 or s3://bucket/resnet50"
    )
    parser.add_argument(
        "--weights",
        metavar="WEIGHTS",
        help="random[:SEED], a name of the library's weights (DEFAULT, IMAGENET1K_V1), or a local checkpoint: "
        ".safetensors, .pth, .pt, .bin, .ckpt or .pth.tar, an index.json of Hugging Face's shards, or a folder with "
        "one of them (default: DEFAULT, and random for package.module:factory)",
    )
    parser.add_argument(
        "--num-classes",
        type=count(1, MAX_CLASSES),
        metavar="N",
        help="give the head N classes (default: as it is)",
    )
    configure_shape(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="remove the earlier versions of this name that no tag holds (default: they stay, as NAME@VERSION)",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="also check what the store has of this model's tensors, and mend what is damaged, for all models",
    )
    parser.add_argument("--tag", metavar="TAG", help="name the version, as hapi tag does")
    configure_allowed(parser, "a factory that a model file may name, which makes its network")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def configure_shape(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that decide the list of layers: the input's size and the blocks."""
    parser.add_argument(
        "--input-size",
        type=count(1, MAX_IMAGE_SIDE),
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
    known = is_checkpoint(args.model)
    if is_factory(args.model) or known:
        search_here()
    if not known:
        check_model(args.model)
        check_weights(args.model, args.weights or "auto")
    if args.tag is not None:
        check_tag_flag(args.tag)
    from hapi.api.pushing import PushOptions, push_model  # brings torch, after what can be told without

    with TransferBar(f"pushing {name}", args.quiet, by_bytes=True) as bar:
        pushed = push_model(
            args.model,
            args.address,
            weights=args.weights,
            num_classes=args.num_classes,
            input_size=args.input_size,
            blocks=blocks_of(args),
            options=PushOptions(args.replace, args.repair, args.tag, args.allow_model),
            progress=Hashed(bar),
            on_note=lambda line: tell("hapi push", line),
        )
    _tell(pushed, store.url)
    return 0


class Hashed:
    """Shows how much of a model was read and hashed; what is written is a part of it."""

    def __init__(self, bar: TransferBar) -> None:
        self._bar = bar
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """Note progress of a push."""
        if not self._done:
            self._bar.start(total)
        self._bar.advance(0, done - self._done)
        self._done = done


def check_tag_flag(tag: str) -> None:
    """Raise :class:`UsageError` unless ``tag`` can name a version."""
    try:
        check_tag(tag, "--tag")
    except BadRequestError as error:
        raise UsageError(str(error)) from None


def _tell(pushed: Pushed, url: str) -> None:
    manifest = pushed.model.manifest
    size = format_bytes(manifest.nbytes)
    classes = f", {counted(manifest.classes, 'class')}" if manifest.classes else ""
    layers = counted(len(manifest.layers), "layer")
    architecture = "tensors" if manifest.spec is None else manifest.spec.architecture
    if pushed.new:
        moved = (
            f", of which {format_bytes(pushed.written)} are new to the store"
            if pushed.written < manifest.nbytes
            else ""
        )
        say(f"pushed {architecture} as {manifest.reference!r} into {url}: {layers}, {size}{moved}{classes}")
    else:
        say(f"{architecture} is in {url} already, as {manifest.reference!r}: {layers}, {size}{classes}")
    if manifest.spec is None:
        say(
            f"digest {manifest.digest}; there is no network for these tensors, so they can be pulled, shown and "
            "compared but not trained; to train, push ARCHITECTURE with --weights"
        )
        return
    allowed = f" --allow-model {architecture}" if is_factory(architecture) else ""
    say(f"digest {manifest.digest}; train with: hapi-train --model store:{manifest.name}{allowed}")
