"""``hapi rm`` and ``hapi gc`` over a real OpenStack Swift, killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.harness import hapi
from support.swift_tools import PACKED, Swift

STORE = "s3://hapi/removal"
KILLED = """
import os, signal, sys
from hapi.cli.main import main
from hapi.store.remote import RemoteStore

left, delete = int(sys.argv[1]), RemoteStore.delete

def dying(self, key):
    global left
    if "lock" not in key:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    delete(self, key)

RemoteStore.delete = dying
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_removed_with_kills(swift: Swift) -> None:
    env = {**os.environ, **swift.environment}
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    rm = ["rm", f"{STORE}/digits", "--yes", "--keep-old", "0"]
    done = subprocess.run([sys.executable, "-c", KILLED, "3", *rm], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "digits" not in hapi("ls", STORE, **swift.environment).stdout
    assert "removed" in hapi("gc", STORE, "--yes", **swift.environment).stdout
    assert "every object belongs to something" in hapi("gc", STORE, **swift.environment).stdout
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    assert "sound" in hapi("verify", f"{STORE}/digits", "--quiet", **swift.environment).stdout
