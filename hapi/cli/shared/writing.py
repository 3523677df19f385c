"""Common parts of commands that write into a store: their flags, and notes on a dataset that was replaced."""

from __future__ import annotations

import argparse

from hapi.cli.shared.common import tell
from hapi.cli.shared.numbers import seconds
from hapi.data.replaced import KEEP_OLD_SECONDS, MAX_KEEP_SECONDS, list_replaced
from hapi.errors import UsageError
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
from hapi.units import format_bytes


def configure_writing(parser: argparse.ArgumentParser, work: str) -> None:
    """Declare the flags; ``work`` is "packing" or "indexing"."""
    parser.add_argument("--replace", action="store_true", help="replace the dataset of this name")
    parser.add_argument(
        "--keep-old", type=seconds(0, MAX_KEEP_SECONDS), default=KEEP_OLD_SECONDS, metavar="TIME",
        help="keep a replaced version readable for so long, for jobs that run with it (default 24h); "
        "0 removes all replaced versions now",
    )  # fmt: skip
    parser.add_argument(
        "--restart", action="store_true", help=f"throw an unfinished {work} of this name away"
    )
    configure_lock(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def configure_lock(parser: argparse.ArgumentParser) -> None:
    """Declare ``--force-lock``."""
    parser.add_argument(
        "--force-lock", action="store_true", help="take the lock of another writer that is known to be dead"
    )


def lasting_store(url: str) -> ObjectStore:
    """The store at ``url``; :class:`UsageError` for one that ends with this process."""
    if url.lower().startswith("memory:"):
        raise UsageError(
            f"{url}: such a store ends with this command, and nothing would be left; give another"
        )
    return open_store(url)


def tell_replaced(program: str, store: ObjectStore, name: str) -> None:
    """Print a line for each replaced version of dataset ``name`` that is kept."""
    for known in list_replaced(store, name):
        size = format_bytes(known.manifest.total_bytes)
        tell(
            program, f"kept for running jobs: {known} ({size}); a later --replace removes it after that time"
        )
