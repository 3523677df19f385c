"""``hapi gc STORE``: objects of a store that belong to no dataset or model."""

from __future__ import annotations

import argparse

from hapi.cli.shared.common import EXIT_FAILED, EXIT_OK, say
from hapi.cli.shared.numbers import seconds
from hapi.ingest.removal import UNFINISHED_SECONDS, collect
from hapi.store.open import open_store
from hapi.text import counted, printable
from hapi.units import format_bytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("store", metavar="STORE", help="URL or folder of the object store")
    parser.add_argument(
        "--yes", action="store_true", help="remove them; without this flag nothing is changed"
    )
    parser.add_argument(
        "--older-than", type=seconds(0), default=UNFINISHED_SECONDS, metavar="TIME",
        help="give up a packing that was begun so long ago, is not finished and not worked on (default 24h)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print a line for each name that has such objects, then the sum. Damage that hides some is a failure."""
    store = open_store(args.store)
    count = size = 0
    code, known = EXIT_OK, True
    verb = "removed" if args.yes else "would remove"
    for found in collect(store, older_than=args.older_than, dry_run=not args.yes):
        if found.objects:
            say(
                f"{found.kind} {found.name}: {verb} {counted(len(found.objects), 'object')}, {format_bytes(found.size)}"
            )
        for note in found.notes:
            say(f"{found.kind} {found.name}: {note}")
            known = False
        if found.is_damaged:
            code = EXIT_FAILED
        count += len(found.objects)
        size += found.size
    if not count:
        what = "every object belongs to something" if known else f"{verb} nothing"
        say(f"{printable(store.url)}: {what}")
        return code
    advice = "" if args.yes else "; add --yes to do it"
    say(f"{verb} {counted(count, 'object')}, {format_bytes(size)}{advice}")
    return code
