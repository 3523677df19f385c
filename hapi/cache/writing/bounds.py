"""Default bound of a cache's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

MAX_DEFAULT_BYTES = 100 * 10**9
"""Largest default budget."""


def half_of(folder: Path, held: int) -> int:
    """Return half of what the disk of ``folder`` has free, or ``held`` by a cache there, at most 100 GB."""
    return min(MAX_DEFAULT_BYTES, (shutil.disk_usage(folder).free + held) // 2)
