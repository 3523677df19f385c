"""A control group with a cap on memory, and commands that run in it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_cap(nbytes: int) -> Iterator[Path]:
    """A control group whose processes may take ``nbytes`` together; the test is skipped where none can be made."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    group = (root / "memory" if is_first else root) / f"hapi-offload-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(nbytes))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for _ in range(600):
        try:
            group.rmdir()
            return
        except OSError:  # its last process is being taken away
            time.sleep(0.1)


def run_in(
    group: Path, command: Sequence[str], folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``group`` and ``folder``, with this tree's package and ``more`` variables."""
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        ["sh", "-c", enter, str(group), *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
