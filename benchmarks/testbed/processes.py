"""Common parts of benchmarks of files: a figure from a separate process, and files whose pages leave the
memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.testbed.bed import stop_all
from benchmarks.testbed.tiers import environment, last_line
from hapi.errors import HapiError, TransportError

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


@contextlib.contextmanager
def sending_process(module: str, *arguments: str) -> Iterator[dict[str, int]]:
    """``python -m module arguments``, which prints its ports by name once it listens and ends with its standard input.

    Yields the ports; :class:`TransportError` when it does not begin.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise TransportError("the benchmark's server did not start; its error stands above")
        yield json.loads(line)
    finally:
        stop_all([process])


def drop_pages(path: Path) -> None:
    """Let the system forget a file's pages, which needs no root; whether it did is to be looked at."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
