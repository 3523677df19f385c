"""``hapi cache ls DIR`` and ``hapi cache clear DIR``: contents of a sample cache, and making room in it."""

from __future__ import annotations

import argparse
import time

from hapi.cache.folder import MARKER, SAMPLE_CACHE_BYTES, CacheFolder
from hapi.cli.shared.common import EXIT_OK
from hapi.errors import HapiError, UsageError
from hapi.paths import user_path
from hapi.units import format_bytes, format_duration


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", choices=("ls", "clear"), help="list it, or remove versions that no process uses"
    )
    parser.add_argument("folder", metavar="DIR", help="folder of --sample-cache")


def run(args: argparse.Namespace) -> int:
    """Print one line for each dataset version: bytes, last use; or the removed ones."""
    if not (user_path(args.folder, "FOLDER") / MARKER).is_file():
        raise UsageError(f"{args.folder}: is no sample cache")
    folder = CacheFolder.open(args.folder, SAMPLE_CACHE_BYTES)
    try:
        removed = folder.clear() if args.action == "clear" else []
        left = folder.versions()
    except OSError as error:
        raise HapiError(f"{args.folder}: {error.strerror or error}") from None
    if args.action == "clear":
        what = "dataset version" if len(removed) == 1 else "dataset versions"
        print(f"removed {len(removed)} {what}, {format_bytes(sum(v.bytes for v in removed))}")
    for version in left:
        used = "in use" if version.in_use else f"used {format_duration(time.time() - version.used_at)} ago"
        print(f"{version.name}  {format_bytes(version.bytes):>10}  {used}")
    if not left and args.action == "ls":
        print("empty")
    return EXIT_OK
