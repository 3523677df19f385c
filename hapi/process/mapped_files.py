"""Pages of mapped files (libraries, above all) that a process has touched once and may not need any more."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_DONTNEED = 4
"""``MADV_DONTNEED`` (mman.h)."""
_AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r-.p) [0-9a-f]+ [0-9a-f:]+ [1-9]\d* +/")
"""First line of an area in ``smaps``: of a file, private, and not to be written."""


def give_back_file_pages(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Unmap the pages of files that this process can only read; return their bytes, 0 where the system has no list.

    They stay in the page cache: a page that is used once more is mapped by a fault that reads nothing. Importing torch
    with CUDA touches 300 MB of libraries that training on a CPU never uses. Areas with pages of their own (those that
    the loader relocated) are left alone.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        lines = smaps.read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(
            resident
            for start, stop, resident in file_areas(lines)
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED) == 0
        )
    return 0


def file_areas(lines: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """Yield addresses and resident bytes of the areas in ``smaps`` whose every page is its file's."""
    area: tuple[int, int] | None = None
    resident = 0
    for line in lines:
        name, _, value = line.partition(":")
        if " " in name:
            found = _AREA.match(line)
            area = None if found is None else (int(found[1], 16), int(found[2], 16))
        elif name == "Rss":
            resident = int(value.split()[0]) * 1024
        elif name == "Anonymous" and area is not None and resident and value.split()[0] == "0":
            yield *area, resident
