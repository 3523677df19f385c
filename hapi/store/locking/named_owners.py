"""Owners of locks on a disk that is full: a new name fits where a new content does not.

    .ID.LEASE.BOOT-NAMESPACE-PID-START.owner     second name of an empty lock's file: who holds the lock

The name is there before the lock is, and is removed after it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hapi.living import ProcessIdentity
from hapi.store.locking.locks import LockOwner

_NAME = re.compile(r"\.([0-9a-f]{24})\.([0-9.]{1,12})\.([0-9a-f]{0,32}-\d+-\d+-\d+)\.owner")


def add_name(file: Path, owner: LockOwner, full: OSError) -> Path:
    """Give ``file`` a second name in its folder that describes its owner, and return it.

    Raises:
        OSError: ``full``, if the owner cannot be described so, or the file system has no second names.
    """
    if owner.process is None:
        raise full
    name = file.with_name(f".{owner.id}.{owner.lease:g}.{owner.process.to_text()}.owner")
    try:
        name.hardlink_to(file)
    except OSError:
        raise full from None
    return name


def owner_of(lock: Path) -> tuple[LockOwner, int] | None:
    """Return the owner of the lock in this file as its second name describes it, and the time of its last sign of life
    in nanoseconds; None without such a name.
    """
    with suppress(OSError):
        state = lock.stat()
        for name, owner in _names(lock.parent):
            with suppress(FileNotFoundError):
                if os.path.samestat(name.stat(), state):
                    return owner, state.st_mtime_ns
    return None


def remove_unused(folder: Path) -> list[Path]:
    """Remove the names in ``folder`` that are their files' only ones: of locks that are gone; return them."""
    removed = []
    for name, _ in list(_names(folder)):
        with suppress(OSError):
            if name.stat().st_nlink == 1:
                name.unlink()
                removed.append(name)
    return removed


def _names(folder: Path) -> Iterator[tuple[Path, LockOwner]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                with suppress(ValueError):
                    process = ProcessIdentity.from_text(match[3])
                    yield Path(entry.path), LockOwner(match[1], process, float(match[2]))
