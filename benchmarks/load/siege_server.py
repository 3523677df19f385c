"""``hapi-server`` as it is, but reads of some objects do not come back, and few descriptors are to be had.

``python -m benchmarks.load.siege_server --hang TEXT --until FILE --descriptors N -- ARGUMENTS OF hapi-server``. A
local read of a key that contains TEXT waits until FILE exists: what a stalled network file system does to a thread.
"""

from __future__ import annotations

import argparse
import resource
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hapi.store.base import ReadPart
from hapi.store.local import LocalStore

LOOK_SECONDS = 0.1


def hang_reads(text: str, until: Path) -> None:
    """Make local reads of keys that contain ``text`` wait until ``until`` exists."""
    read_many, read_into = LocalStore.read_many, LocalStore.read_into

    def wait_for(key: str) -> None:
        """Wait as long as reads of these keys hang."""
        while text in key and not until.exists():
            time.sleep(LOOK_SECONDS)

    def hanging_many(store: LocalStore, parts: Sequence[ReadPart], *more: Any) -> None:
        """Read parts, hanging as asked."""
        for part in parts:
            wait_for(part.key)
        read_many(store, parts, *more)

    def hanging_into(store: LocalStore, key: str, *more: Any) -> None:
        """Read into a buffer, hanging as asked."""
        wait_for(key)
        read_into(store, key, *more)

    for name, method in (("read_many", hanging_many), ("read_into", hanging_into)):
        setattr(LocalStore, name, method)


def main() -> None:
    """Serve until told to stop; the process ends with the exit code of hapi-server."""
    parser = argparse.ArgumentParser(prog="siege_server", allow_abbrev=False)
    parser.add_argument("--hang", required=True)
    parser.add_argument("--until", required=True, type=Path)
    parser.add_argument("--descriptors", required=True, type=int)
    parser.add_argument("arguments", nargs="*")
    own = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (own.descriptors, own.descriptors))
    hang_reads(own.hang, own.until)
    sys.argv = ["hapi-server", *own.arguments]
    runpy.run_module("hapi.cli.server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
