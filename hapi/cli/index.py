"""``hapi index FOLDER STORE/NAME``."""

from __future__ import annotations

import argparse

from hapi.api.datasets import index
from hapi.cli.pack import (
    class_names,
    configure_bad,
    configure_transform,
    transform_of,
)
from hapi.cli.shared.common import say, tell
from hapi.cli.shared.labels import configure_labels, label_options
from hapi.cli.shared.numbers import count
from hapi.cli.shared.progress import TransferBar
from hapi.cli.shared.writing import configure_writing, lasting_store, tell_replaced
from hapi.data.manifest import Manifest
from hapi.errors import UsageError
from hapi.ingest.formats.registry import FORMATS
from hapi.ingest.formats.shard import Fields
from hapi.ingest.in_place.discover import find_folder, left_out_note
from hapi.ingest.in_place.indexer import IndexOptions
from hapi.ingest.skipped import Skipped
from hapi.store.open import split_address
from hapi.text import counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="key prefix or local path of the shards or images in STORE, also a pattern ('wds/train-*'); '.' for all",
    )
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/flowers or s3://bucket/flowers"
    )
    group = parser.add_argument_group("contents")
    group.add_argument("--format", choices=("auto", *FORMATS), default="auto",
                       help="default: by the objects' names")  # fmt: skip
    group.add_argument("--image", metavar="FIELD", help="the field or file extension of a sample's image")
    configure_labels(
        group,
        labels_of="labels of all samples in their order (.npy or text)",
        metavar="FIELD",
        label_of="the field or file extension of a sample's label; of a table, its COLUMN[,COLUMN]",
    )
    group.add_argument("--classes", metavar="A,B,...", help="names of the classes, or @FILE with one a line")
    configure_bad(group)
    configure_transform(parser)
    parser.add_argument(
        "--workers",
        type=count(1, 256),
        metavar="N",
        help="threads that read shards (default: 2 of a folder, else 8)",
    )
    configure_writing(parser, "indexing")


def run(args: argparse.Namespace) -> int:
    """Index, and print a summary."""
    url, name = split_address(args.address)
    store = lasting_store(url)
    labels = label_options(args, None if args.labels is None else args.label, store)
    options = IndexOptions(
        **vars(labels),
        fields=Fields(image=args.image, label=args.label if args.labels is None else None),
        classes=class_names(args.classes),
        transform=transform_of(args, None),
        decode=args.decode,
        skip_bad=args.skip_bad,
        workers=args.workers,
    )
    if not args.folder.strip():
        raise UsageError("FOLDER is empty; give the key prefix of the shards, or '.' for the whole store")
    folder = find_folder(store, args.folder, None if args.format == "auto" else args.format)
    _tell(f"{folder.title} is {folder.module.NAME}: {counted(len(folder.shards), 'shard')}, "
          f"{sum(info.size for info in folder.shards) / 1e6:.1f} MB")  # fmt: skip
    note = left_out_note(folder)
    if note is not None:
        _tell(note)
    skipped = Skipped()
    with TransferBar(f"indexing {name}", args.quiet, by_bytes=True) as bar:

        def start(samples: int, size: int) -> None:
            """Report samples that an earlier run completed, and start the bar."""
            if samples:
                _tell(f"going on after {counted(samples, 'sample')} ({size / 1e6:.1f} MB)")
            bar.start(sum(info.size for info in folder.shards), size)

        manifest = index(
            folder, args.address, options,
            replace=args.replace, restart=args.restart, force_lock=args.force_lock,
            keep_old=args.keep_old,
            on_start=start, on_progress=bar.advance, on_skipped=skipped.add,
        )  # fmt: skip
    for line in skipped.messages():
        _tell(line)
    _print(args.address, manifest)
    if args.replace:
        tell_replaced("hapi index", store, name)
    return 0


def _print(address: str, manifest: Manifest) -> None:
    say(
        f"indexed {manifest.source} as {address}: {counted(manifest.count, 'sample')}, {manifest.label_form.summary}, "
        f"{manifest.total_bytes / 1e6:.1f} MB in {counted(manifest.shards, 'shard')}, left in place, "
        f"{f'{manifest.skipped} left out, ' if manifest.skipped else ''}version {manifest.version}"
    )


def _tell(line: str) -> None:
    tell("hapi index", line)
