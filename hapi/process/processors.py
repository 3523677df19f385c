"""The processor cores that this process may use."""

from __future__ import annotations

import os


def processor_count() -> int:
    """Processor cores that this process may use: fewer than the machine has where it is pinned to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
