"""What benchmarks of files share: a figure from a process of its own, and files whose pages leave the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.testbed.tiers import environment, last_line
from hapi.errors import HapiError

LIMIT_SECONDS = 600.0


def process_figure(module: str, *arguments: str, what: str) -> dict[str, Any]:
    """The JSON object that ``python -m module arguments`` prints; :class:`HapiError` naming ``what`` when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env=environment(""),
    )
    if done.returncode:
        raise HapiError(f"{what} failed: {last_line(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def drop_pages(path: Path) -> None:
    """Let the system forget a file's pages, which needs no root; whether it did is to be looked at."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
