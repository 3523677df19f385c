"""``hapi cache ls``, ``hapi cache clear`` and ``hapi cache verify``: what a cache holds, room in it, its check."""

from __future__ import annotations

import argparse
import time

from hapi.cache.folder import MARKER, CacheFolder, Version
from hapi.cache.inventory import computers, count_records, describe, verify
from hapi.cache.open_folder import default_path
from hapi.cli.shared.common import EXIT_CODES, EXIT_FAILED, EXIT_OK
from hapi.errors import HapiError, NotFoundError, UsageError
from hapi.models.shared.place import weights_folder
from hapi.paths import user_path
from hapi.text import counted
from hapi.units import format_bytes, format_duration

ACTIONS = {
    "ls": "list what it holds",
    "clear": "remove what no process uses",
    "verify": "read every record and remove the damaged ones",
}
"""Help lines by action."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.set_defaults(only=[], verbose=False)
    # Each action has a parser of its own, or argparse would refuse a folder that stands after a flag.
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary, epilog=EXIT_CODES)
        action.add_argument(
            "folder",
            metavar="DIR",
            nargs="?",
            help="folder of --cache-dir (default: $XDG_CACHE_HOME/hapi/cache, which is ~/.cache/hapi/cache)",
        )
        action.add_argument("--cache-dir", metavar="DIR", help="the same, as hapi-train has it")
        if name == "clear":
            action.add_argument(
                "--only",
                metavar="NAME",
                action="append",
                default=[],
                help="clear only what ls shows by this name; may be repeated",
            )
        if name == "ls":
            action.add_argument(
                "-v",
                "--verbose",
                action="store_true",
                help="list also which devices and libraries computed the features, and their smallest forward pass",
            )


def run(args: argparse.Namespace) -> int:
    """Print a line for each dataset version and each key of features; exit code 1 when verify found damage."""
    if args.folder is not None and args.cache_dir is not None:
        raise UsageError(f"--cache-dir {args.cache_dir}: a folder is given already, {args.folder}")
    named = args.folder or args.cache_dir
    folder = _open(named)
    try:
        if args.action == "verify":
            return _verify(folder)
        if args.action == "clear":
            _clear(folder, args.only)
            left = [version for version in folder.versions() if version.in_use]
        else:
            left = folder.versions()
        for version in left:
            print(_line(folder, version))
            for computer in computers(folder.path / version.name) if args.verbose else ():
                print(f"    computed by {computer}")
        if not left and args.action == "ls":
            print("empty")
    except OSError as error:
        raise HapiError(f"{folder.path}: {error.strerror or error}") from None
    if named is None and not args.only:
        _weights(args.action)
    return EXIT_OK


def _weights(action: str) -> None:
    """Print a line about weights in shared memory, if there are any, or remove those that no process uses."""
    folder = weights_folder()
    if folder is None:
        return
    try:
        if action == "clear" and (removed := folder.clear()):
            print(f"removed {format_bytes(removed)} of weights in {folder.path}")
        held, idle = folder.usage()
    except OSError as error:
        raise HapiError(f"{folder.path}: {error.strerror or error}") from None
    if held:
        print(f"weights in {folder.path}  {format_bytes(held)}, {format_bytes(held - idle)} in use")


def _open(name: str | None) -> CacheFolder:
    """The cache at ``name``, or the user's own, which need not be there."""
    path = default_path() if name is None else user_path(name, "DIR")
    if path is None:
        raise UsageError("there is no home folder; name the cache's folder")
    if not (path / MARKER).is_file() and (name is not None or path.exists()):
        raise UsageError(f"{path}: is no cache of Hapi")
    return CacheFolder.open(path, None)


def _line(folder: CacheFolder, version: Version) -> str:
    path = folder.path / version.name
    stored = count_records(path)
    kept = f"{stored.records:,} kept"
    raw = "" if stored.raw_bytes is None else f" for {format_bytes(stored.raw_bytes)} raw"
    used = (
        "in use" if version.in_use else f"used {format_duration(max(0.0, time.time() - version.used_at))} ago"
    )
    return f"{version.name}  {describe(path)}  {kept}  {format_bytes(version.bytes):>10}{raw}  {used}"


def _clear(folder: CacheFolder, names: list[str]) -> None:
    known = {version.name for version in folder.versions()}
    for name in names:
        if name not in known:
            raise NotFoundError(f"{folder.path}: has no {name}; 'hapi cache ls' lists what it has")
    removed = folder.clear(names or None)
    print(f"removed {counted(len(removed), 'version')}, {format_bytes(sum(v.bytes for v in removed))}")


def _verify(folder: CacheFolder) -> int:
    damaged = 0
    for version in folder.versions():
        found = verify(folder, version.name)
        damaged += found.damaged
        state = f"{found.damaged:,} damaged, removed" if found.damaged else "in order"
        print(f"{version.name}  {found.records:,} read  {state}")
    if not damaged:
        return EXIT_OK
    print(f"removed {counted(damaged, 'damaged record')}; what is gone is fetched or computed and kept again")
    return EXIT_FAILED
