"""Description and check of what a cache folder holds, for people."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from hapi.cache.folder import SEGMENT, CacheFolder
from hapi.cache.key_file import read_key_file
from hapi.cache.recovery import Checked, verify_version
from hapi.cache.segments import read_contents, seed_of
from hapi.errors import DataError


def describe(folder: Path) -> str:
    """Return what the records of a version are: ``samples``, or ``features of flowers@1234, cut 3 (relu), ...``."""
    found = read_key_file(folder)
    if found is None:
        return "samples"
    made = f", by {'; '.join(found.made_with)}" if found.made_with else ""
    with contextlib.suppress(KeyError, TypeError):
        return f"features of {found.dataset}@{found.key['dataset'][:12]}, {_cut(found.key)}{made}"
    return f"features of {found.dataset}{made}"


def _cut(key: dict[str, Any]) -> str:
    shape = "x".join(map(str, key["shape"]))
    return f"model {key['prefix'][:12]}, cut {key['cut']} ({key['cut_name']}), {key['dtype']} {shape}"


def count_records(folder: Path) -> int:
    """Return the number of records in the sealed segments of a version."""
    seed, total = seed_of(folder.name), 0
    for path in folder.glob(f"{SEGMENT}*"):
        with contextlib.suppress(OSError, DataError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                total += len(read_contents(descriptor, seed).ids)
            finally:
                os.close(descriptor)
    return total


def verify(folder: CacheFolder, name: str) -> Checked:
    """Read every record of the version ``name``, and drop the damaged ones, also those of killed processes.

    Raises:
        OSError: a file cannot be read or written.
        HapiError: the folder cannot be used.
    """
    path = folder.path / name
    users = folder.attach(path)
    try:
        folder.recover(path)
        return verify_version(path, sorted(path.glob(f"{SEGMENT}*")))
    finally:
        folder.detach(path, users)
