"""All files below a folder of the local file system, linked folders included."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of a look at a dangling link, or at a file that was removed just now."""


def files_below(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path, state) of each file, in no order; nothing without a folder. OSError for unreadable
    folders.

    Names that begin with a dot, dangling links and files that vanish meanwhile are skipped. Links are
    followed, each folder once (a link may point upwards): under its own name if it has one here, otherwise by
    the first link.
    """
    # Texts, not paths: a million of those take a quarter of a minute.
    seen: set[tuple[int, int]] = set()
    linked = [top]
    while linked:
        waiting, linked = sorted(linked, reverse=True), []
        while waiting:
            folder = waiting.pop()
            yield from _entries(folder, seen, waiting, linked)


def _entries(
    folder: str, seen: set[tuple[int, int]], below: list[str], linked: list[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """The files in ``folder`` unless it was ``seen``; its folders are put into ``below``, those by links elsewhere."""
    try:
        status = os.stat(folder or "/")  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder or "/") as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        if error.errno in GONE:
            return
        raise
    for entry in found:
        path = f"{folder}/{entry.name}"
        try:
            if entry.is_dir():
                (linked if entry.is_symlink() else below).append(path)
                continue
            state = entry.stat()
        except OSError as error:
            if error.errno in GONE:
                continue
            raise
        yield path, state
