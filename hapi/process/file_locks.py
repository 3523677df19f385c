"""Locks of files (``flock``), which the kernel frees when their process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_at_once(descriptor: int) -> bool:
    """Take the lock of an open file for this process alone; return whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_at_once(descriptor: int) -> bool:
    """Take the lock of an open file together with others; return whether no process had it alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Give the lock of an open file back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: str | Path) -> bool:
    """Return whether a living process has locked the file at ``path``, alone or with others."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return not lock_at_once(descriptor)
    finally:
        os.close(descriptor)
