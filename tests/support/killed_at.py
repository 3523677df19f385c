"""``hapi`` in a process that SIGKILL ends at its n-th change of the files below a folder, or at a sync of one.

    python -m support.killed_at FOLDER MOMENTS ARGUMENT...     MOMENTS changes happen; the next one does not

The interpreter's audit events tell of every file that is made, moved, linked or removed, just before it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hapi.cli.main import main
from support.forked import ForkedProcess, environment

_CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")


def killed_at(folder: Path, moments: int, *arguments: str) -> tuple[int, str]:
    """Run ``hapi`` with these arguments; return its exit code, -9 if it was killed, and what it printed."""
    process = ForkedProcess(
        [__name__, str(folder), str(moments), *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate()
    return process.wait(), output


def _die_at(folder: str, moments: int) -> None:
    left, sync = moments, os.fsync

    def moment() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def inside(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        makes = event == "open" and bool(arguments[2] & os.O_CREAT)
        if (makes or event in _CHANGES) and any(map(inside, arguments[:2])):
            moment()

    def syncing(descriptor: int) -> None:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(folder):
            moment()
        sync(descriptor)

    os.fsync = syncing
    sys.addaudithook(hook)


if __name__ == "__main__":
    _die_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
