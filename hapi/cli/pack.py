"""``hapi pack SOURCE STORE/NAME``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hapi.api.datasets import open_source_for, pack
from hapi.cli.shared.common import say, tell
from hapi.cli.shared.labels import configure_labels, label_options
from hapi.cli.shared.numbers import count, real, size
from hapi.cli.shared.progress import TransferBar
from hapi.cli.shared.writing import configure_writing, lasting_store, tell_replaced
from hapi.errors import BadRequestError, UsageError
from hapi.ingest.pack_options import DEFAULT_SHARD_BYTES, MAX_SHARD_BYTES, MIN_SHARD_BYTES, PackOptions
from hapi.ingest.skipped import Skipped
from hapi.paths import read_bounded
from hapi.store.open import split_address
from hapi.text import counted
from hapi.wire.references import MAX_IMAGE_SIDE, MAX_LEVEL, MIN_STD, TransformSpec

MAX_CLASSES_BYTES = 64 << 20
"""Largest file of class names."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images (one folder per class), a .npy/.npz/.safetensors file, "
        "torchvision:NAME[:root=PATH][:split=train|test], sklearn:digits or sklearn:photos",
    )
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/flowers or s3://bucket/flowers"
    )
    _configure_source(parser)
    configure_transform(parser)
    configure_bad(parser)
    parser.add_argument("--preprocess", choices=("none", "uint8", "float32"), default="none",
                        help="store tensors: cropped (uint8) or ready for the model (float32)")  # fmt: skip
    parser.add_argument("--shard-size", type=size(MIN_SHARD_BYTES, MAX_SHARD_BYTES), default=DEFAULT_SHARD_BYTES,
                        metavar="SIZE", help="bytes of one stored object, such as 64MiB (the default)")  # fmt: skip
    parser.add_argument(
        "--workers",
        type=count(1, 256),
        default=4,
        metavar="N",
        help="threads that read the source (default 4)",
    )
    configure_writing(parser, "packing")


def configure_bad(parser: Any) -> None:
    """Declare the flags for bad samples, for packing and indexing alike."""
    parser.add_argument("--decode", action="store_true",
                        help="decode every image, not only look at its beginning; slow")  # fmt: skip
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave bad samples out and count them; else the first one ends the command")  # fmt: skip


def _configure_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("contents")
    configure_labels(
        group,
        labels_of="labels of an array without them (.npy or text)",
        metavar="COLUMN[,COLUMN]",
        label_of="the table's columns that are the label, by name or number (default: the only other one)",
    )
    group.add_argument(
        "--classes",
        metavar="A,B,...",
        help="all classes in the order of their labels, or @FILE with one a line",
    )
    group.add_argument("--download", action="store_true", help="let torchvision fetch missing files")
    group.add_argument(
        "--limit", type=count(1, 1 << 48), metavar="N", help="only N samples, spread evenly over the source"
    )
    group.add_argument("--part", choices=("all", "train", "validation"), default="all",
                       help="one side of a fixed split into training and validation")  # fmt: skip
    group.add_argument("--validation-fraction", type=real(0, 1), default=0.2, metavar="F",
                       help="share of samples in the part 'validation' (default 0.2)")  # fmt: skip


def configure_transform(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that :func:`transform_of` reads."""
    group = parser.add_argument_group("how samples become the model's input (kept in the dataset)")
    group.add_argument(
        "--image-size",
        type=count(1, MAX_IMAGE_SIDE),
        metavar="N",
        help="N x N inputs: short side to 8/7 N, centre crop",
    )
    group.add_argument(
        "--resize", type=count(1, MAX_IMAGE_SIDE), metavar="N", help="short side after resizing (default 256)"
    )
    group.add_argument(
        "--crop", type=count(1, MAX_IMAGE_SIDE), metavar="N", help="side of the centre crop (default 224)"
    )
    group.add_argument(
        "--mean",
        type=real(-MAX_LEVEL, MAX_LEVEL),
        nargs=3,
        metavar=("R", "G", "B"),
        help="subtracted from 0..1",
    )
    group.add_argument(
        "--std", type=real(MIN_STD, MAX_LEVEL), nargs=3, metavar=("R", "G", "B"), help="divided by afterwards"
    )


def run(args: argparse.Namespace) -> int:
    """Pack, and print a summary."""
    url, name = split_address(args.address)
    store = lasting_store(url)
    source = open_source_for(
        args.source,
        args.address,
        labels=label_options(args, args.label, store),
        classes=class_names(args.classes),
        download=args.download,
    )
    options = PackOptions(
        shard_bytes=args.shard_size,
        transform=transform_of(args, source.transform),
        preprocess=args.preprocess,
        limit=args.limit,
        part=args.part,
        validation_fraction=args.validation_fraction,
        workers=args.workers,
        decode=args.decode,
        skip_bad=args.skip_bad,
    )
    if source.note:
        tell("hapi pack", source.note)
    skipped = Skipped()
    with TransferBar(f"packing {name}", args.quiet) as bar:

        def start(total: int, samples: int, size: int) -> None:
            """Report samples that an earlier run completed, and start the bar."""
            if samples:
                tell("hapi pack", f"going on after {counted(samples, 'sample')} ({size / 1e6:.1f} MB)")
            bar.start(total, samples)

        manifest = pack(
            source, args.address, options,
            replace=args.replace, restart=args.restart, force_lock=args.force_lock,
            keep_old=args.keep_old,
            on_start=start, on_progress=bar.advance, on_skipped=skipped.add,
        )  # fmt: skip
    for line in skipped.messages():
        tell("hapi pack", line)
    if args.replace:
        tell_replaced("hapi pack", store, name)
    say(
        f"packed {manifest.source} as {args.address}: {counted(manifest.count, 'sample')}, "
        f"{manifest.label_form.summary}, "
        f"{manifest.total_bytes / 1e6:.1f} MB in {counted(manifest.shards, 'shard')}, "
        f"{f'{manifest.skipped} left out, ' if manifest.skipped else ''}version {manifest.version}"
    )
    return 0


def transform_of(args: argparse.Namespace, own: TransformSpec | None) -> TransformSpec | None:
    """Return the flags' transform over the source's ``own`` or the default one; None without such flags."""
    given = {k: getattr(args, k) for k in ("resize", "crop", "mean", "std") if getattr(args, k) is not None}
    if args.image_size is None and not given:
        return None
    if args.image_size is not None and {"resize", "crop"} & set(given):
        raise UsageError("--image-size sets --resize and --crop; give it or them")
    base = own or TransformSpec()
    try:
        if args.image_size is not None:
            sized = TransformSpec.for_image_size(args.image_size)
            base = replace(base, resize=sized.resize, crop=sized.crop)
        return TransformSpec.from_json({**base.to_json(), **given})
    except BadRequestError as error:
        raise UsageError(str(error)) from None


def class_names(text: str | None) -> tuple[str, ...] | None:
    """Return the names that ``--classes`` gives, or the lines of its @FILE."""
    if text is None:
        return None
    if text.startswith("@"):
        data = read_bounded(text[1:], MAX_CLASSES_BYTES, f"--classes {text}")
        try:
            names = data.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"--classes {text}: is no text: {error}") from None
    else:
        names = text.split(",")
    return tuple(name.strip() for name in names if name.strip())
