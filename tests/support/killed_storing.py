"""``hapi`` in a process that a signal ends at its n-th change of an object store, whichever store that is.

    python -m support.killed_storing CHANGE WHERE COUNT SIGNAL ARGUMENT...

COUNT such changes happen; the next one does not where the signal is SIGKILL.

CHANGE is "put", "delete", or "piece": one of the bytes of a large object while it is written. WHERE is in its key.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hapi.cli.main import main
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.remote import RemoteStore
from support.forked import ForkedProcess, environment


def killed_storing(
    change: str,
    where: str,
    count: int,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    number: int = signal.SIGKILL,
) -> tuple[int, str]:
    """Run ``hapi`` with these arguments; return its exit code, -9 if it was killed, and what it printed.

    ``number``: of the signal. Locks do not count.
    """
    process = ForkedProcess(
        [__name__, change, where, str(count), str(int(number)), *arguments],
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate()
    return process.wait(), output


def _die_at(change: str, where: str, count: int, number: int) -> None:
    left = count

    def moment(key: str) -> None:
        nonlocal left
        before, left = left, left - (where in key and "lock" not in key)
        if left < 0 <= before:
            os.kill(os.getpid(), number)

    def counted(key: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            moment(key)
            yield piece

    def patch(store: type[ObjectStore], name: str) -> None:
        real = getattr(store, name)

        def dying(self: Any, key: str, *data: Any) -> None:
            if name == "put_pieces":
                data = (data[0], counted(key, data[1]))
            else:
                moment(key)
            real(self, key, *data)

        setattr(store, name, dying)

    for store in (LocalStore, RemoteStore):
        patch(store, "put_pieces" if change == "piece" else change)


if __name__ == "__main__":
    _die_at(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.exit(main(sys.argv[5:]))
