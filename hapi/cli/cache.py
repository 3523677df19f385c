"""``hapi cache ls [DIR]`` and ``hapi cache clear [DIR]``: contents of the cache, and making room in it."""

from __future__ import annotations

import argparse
import time

from hapi.cache.folder import MARKER, CacheFolder
from hapi.cache.open_folder import default_path
from hapi.cli.shared.common import EXIT_OK
from hapi.errors import HapiError, UsageError
from hapi.paths import user_path
from hapi.units import format_bytes, format_duration


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", choices=("ls", "clear"), help="list it, or remove versions that no process uses"
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        help="folder of --cache-dir (default: $XDG_CACHE_HOME/hapi/cache, which is ~/.cache/hapi/cache)",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line for each dataset version: bytes, last use; or the removed ones."""
    folder = _open(args.folder)
    try:
        removed = folder.clear() if args.action == "clear" else []
        left = folder.versions()
    except OSError as error:
        raise HapiError(f"{folder.path}: {error.strerror or error}") from None
    if args.action == "clear":
        what = "dataset version" if len(removed) == 1 else "dataset versions"
        print(f"removed {len(removed)} {what}, {format_bytes(sum(v.bytes for v in removed))}")
    for version in left:
        used = "in use" if version.in_use else f"used {format_duration(time.time() - version.used_at)} ago"
        print(f"{version.name}  {format_bytes(version.bytes):>10}  {used}")
    if not left and args.action == "ls":
        print("empty")
    return EXIT_OK


def _open(name: str | None) -> CacheFolder:
    """The cache at ``name``, or the user's own, which need not be there."""
    path = default_path() if name is None else user_path(name, "DIR")
    if path is None:
        raise UsageError("there is no home folder; name the cache's folder")
    if not (path / MARKER).is_file() and (name is not None or path.exists()):
        raise UsageError(f"{path}: is no cache of Hapi")
    return CacheFolder.open(path, None)
