"""A name for the processors that a process runs on, by which two processes see whether they share them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by the kernel when it starts: 122 random bits, the same in all containers of a machine."""


def machine_id() -> str:
    """Return a digest that only processes on the same processors of the same machine have; empty where the system
    does not tell.

    The machine's own name cannot be found from it. A process that is pinned to some of the processors has another one
    than a process that may use all.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        processors = sorted(os.sched_getaffinity(os.getpid()))
    except (OSError, ValueError, AttributeError):
        return ""
    return hashlib.sha256(f"hapi processors {boot} {processors}".encode()).hexdigest()[:32]
