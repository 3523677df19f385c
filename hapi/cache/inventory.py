"""Description and check of what a cache folder holds, for people."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from hapi.cache.folder import SEGMENT, CacheFolder
from hapi.cache.key_file import read_key_file
from hapi.cache.recovery import Checked, verify_version
from hapi.cache.segments import read_contents, seed_of
from hapi.errors import DataError
from hapi.wire.frames import DTYPE_BYTES


def describe(folder: Path) -> str:
    """Return what the records of a version are: ``samples``, or ``features of flowers@1234, cut 3 (relu), ...``."""
    found = read_key_file(folder)
    if found is None:
        return "samples"
    with contextlib.suppress(KeyError, TypeError):
        return f"features of {found.dataset}@{found.key['dataset'][:12]}, {_cut(found.key)}"
    return f"features of {found.dataset}"


def computers(folder: Path) -> tuple[str, ...]:
    """Return a line for each combination of devices, libraries and smallest pass that computed a version's features.

    Features of another one have the same key, and may differ from these in the last bits.
    """
    found = read_key_file(folder)
    return () if found is None else found.made_with


def _cut(key: dict[str, Any]) -> str:
    shape = "x".join(map(str, key["shape"]))
    rounding = key.get("rounding")
    rounded = f", rounded to {rounding['codec']} at split {rounding['split']}" if rounding else ""
    return (
        f"model {key['prefix'][:12]}, cut {key['cut']} ({key['cut_name']}), {key['dtype']} {shape}{rounded}"
    )


class Stored(NamedTuple):
    """Records in the sealed segments of a version."""

    records: int
    raw_bytes: int | None
    """Bytes of the features before they were encoded; None for stored samples, which never are."""


def count_records(folder: Path) -> Stored:
    """Return what the sealed segments of a version hold."""
    seed, total = seed_of(folder.name), 0
    for path in folder.glob(f"{SEGMENT}*"):
        with contextlib.suppress(OSError, DataError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                total += len(read_contents(descriptor, seed).ids)
            finally:
                os.close(descriptor)
    each = None
    if (found := read_key_file(folder)) is not None:
        with contextlib.suppress(KeyError, TypeError):
            each = math.prod(map(int, found.key["shape"])) * DTYPE_BYTES[found.key["dtype"]]
    return Stored(total, None if each is None else total * each)


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
