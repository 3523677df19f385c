"""``hapi pull`` in a process that a signal reaches as soon as it has written so many bytes of tensors.

python -m support.killed_pulling NUMBER BYTES ARGUMENT...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from hapi.cli.main import main
from hapi.repository.pulling import files
from support.forked import ForkedProcess, environment


def killed_pulling(number: int, nbytes: int, *arguments: str) -> tuple[int, str]:
    """Run ``hapi`` with these arguments; return its exit code and what it said on stderr."""
    process = ForkedProcess(
        [__name__, str(number), str(nbytes), *arguments], env=environment(), stderr=subprocess.PIPE
    )
    _, errors = process.communicate()
    return process.wait(), errors


def _signal_at(number: int, nbytes: int) -> None:
    read, left = files.read_in_order, nbytes

    def pieces(*given: Any) -> Iterator[Any]:
        nonlocal left
        for piece in read(*given):
            yield piece
            before, left = left, left - len(piece)
            if left < 0 <= before:
                os.kill(os.getpid(), number)

    files.read_in_order = pieces


if __name__ == "__main__":
    _signal_at(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
