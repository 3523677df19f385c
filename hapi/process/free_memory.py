"""Memory that this process may still take, bounded by the machine, its containers and its own limit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
_UNBOUNDED = 1 << 60
"""Smallest limit of a control group that means no limit; version 1 has no other word for it."""


def host_memory() -> int:
    """Bytes of memory that this machine has; 2^48, more than any has, where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 48


def host_free_bytes() -> int | None:
    """Return the bytes of the machine's memory that this process may still take; None where the system does
    not tell.

    It is the least of three: the machine's available memory, the room that each control group leaves (both
    versions, up to the root, without file pages that can be dropped), and the limit of address space.
    """
    free: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        free.append(_table(PROC / "meminfo")["MemAvailable"] * 1024)
    free += _left_by_groups()
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = _address_space()
        if limit is not None:
            free.append(limit - _table(PROC / "self" / "status")["VmSize"] * 1024)
    return max(0, min(free)) if free else None


def resident_bytes() -> int:
    """Return the memory of this process that is in use; 0 where the system does not tell."""
    return _resident_and_shared()[0]


def anonymous_bytes() -> int:
    """Return the memory of this process that no file and no other process has; 0 where the system does not tell."""
    resident, shared = _resident_and_shared()
    return resident - shared


def _resident_and_shared() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = (PROC / "self" / "statm").read_text(encoding="ascii").split()
        page = os.sysconf("SC_PAGE_SIZE")
        return int(resident) * page, int(shared) * page
    return 0, 0


def _left_by_groups() -> Iterator[int]:
    for folder, limit, used, dropped in _groups():
        with contextlib.suppress(OSError, ValueError):
            maximum = int((folder / limit).read_text(encoding="ascii"))  # "max" is no number: no limit
            if maximum < _UNBOUNDED:
                inactive = 0
                with contextlib.suppress(OSError, ValueError, KeyError):
                    inactive = _table(folder / "memory.stat")[dropped]
                yield maximum - int((folder / used).read_text(encoding="ascii")) + inactive


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Folder of each memory group that this process is in, with the names of its limit, its use and its file pages."""
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = GROUPS, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root = GROUPS / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            # In a container the path may be the host's, of which only the root is there.
            inner = PurePosixPath(path.lstrip("/"))
            for part in (inner, *inner.parents):
                yield root / part, *names


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line."""
    rows = (
        line.replace(":", " ").split()
        for line in path.read_text(encoding="ascii", errors="replace").splitlines()
    )
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _address_space() -> int | None:
    """Bytes of address space that this process may take; None for no limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
