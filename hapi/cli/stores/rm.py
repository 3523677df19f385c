"""``hapi rm STORE/NAME``: a dataset or a pushed model is taken out of a store."""

from __future__ import annotations

import argparse

from hapi.api.contents import is_model
from hapi.cli.shared.common import EXIT_OK, say
from hapi.cli.shared.numbers import seconds
from hapi.cli.shared.writing import configure_lock, lasting_store
from hapi.data.replaced import KEEP_OLD_SECONDS, MAX_KEEP_SECONDS
from hapi.errors import UsageError
from hapi.ingest.removal import Removal, remove
from hapi.store.open import split_model_address
from hapi.text import counted
from hapi.units import format_bytes, format_duration


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "address", metavar="STORE/NAME", nargs="+", help="for example store/flowers or s3://bucket/flowers"
    )
    parser.add_argument("--yes", action="store_true", help="remove it; without this flag nothing is changed")
    parser.add_argument("--model", action="store_true", help="the pushed model of this name, not the dataset")
    parser.add_argument(
        "--keep-old", type=seconds(0, MAX_KEEP_SECONDS), default=KEEP_OLD_SECONDS, metavar="TIME",
        help="keep a dataset's shards for so long, for jobs that run with it (default 24h); after that hapi gc frees "
        "them. 0 frees them now. A model, or NAME@VERSION, goes at once, and jobs that need more of it end; hapi gc "
        "frees the tensors that no other model shares",
    )  # fmt: skip
    configure_lock(parser)


def run(args: argparse.Namespace) -> int:
    """Remove, or say what would be removed, in a line for each."""
    places = [(address, *split_model_address(address)) for address in args.address]
    for address, url, name in places:
        store = lasting_store(url)
        found = remove(
            store, name, model=args.model or is_model(store, name),
            keep_old=args.keep_old, force_lock=args.force_lock, dry_run=not args.yes,
        )  # fmt: skip
        _tell(address, found, args.keep_old, args.yes)
    if not args.yes:
        raise UsageError("nothing was removed; add --yes to do it")
    return EXIT_OK


def _tell(address: str, found: Removal, keep_old: float, done: bool) -> None:
    stays = (
        f"; {format_bytes(found.staying)} more stay for running jobs for {format_duration(keep_old)}, then "
        "hapi gc frees them (--keep-old 0: at once)"
        if found.staying
        else ""
    )
    verb = "removed" if done else "would remove"
    say(
        f"{verb} {found.kind} {address}: {counted(len(found.objects), 'object')}, {format_bytes(found.size)}{stays}"
    )
