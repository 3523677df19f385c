"""A command that is killed in the middle of deleting objects, in a real process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

_PROGRAM = """
import importlib, os, signal, sys
from hapi.cli.main import main

module, name = sys.argv[1].split(":")
store, left = getattr(importlib.import_module(module), name), int(sys.argv[2])
delete = store.delete

def dying(self, key):
    global left
    if "lock" not in key:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    delete(self, key)

store.delete = dying
sys.exit(main(sys.argv[3:]))
"""


def killed_deleting(
    store: str, changes: int, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi`` with these arguments; SIGKILL ends it at a deletion.

    Args:
        store: the store's class, as ``module:Name``.
        changes: deletions that succeed, locks not counted.
        arguments: of ``hapi``.
        env: the process's environment; None for this one's.
    """
    command = [sys.executable, "-c", _PROGRAM, store, str(changes), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
