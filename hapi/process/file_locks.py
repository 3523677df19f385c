"""Locks of files (``flock``), which the kernel frees when their process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_own: set[int] = set()
"""Descriptors that are this process's alone."""


def keep_from_children(descriptor: int) -> int:
    """Let forked children, such as a loader's workers, not have an open file: its lock would outlive this process, and
    its room on the disk its removal. Return the descriptor; :func:`close_own` closes it."""
    _own.add(descriptor)
    return descriptor


def close_own(descriptor: int) -> None:
    """Close a descriptor that was kept from children."""
    _own.discard(descriptor)
    os.close(descriptor)


def _leave_to_parent() -> None:
    """Put nothing in the place of the parent's files, so that a child may close the descriptors as it would."""
    if _own:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _own:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        _own.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


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
