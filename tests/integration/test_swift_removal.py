"""``hapi rm`` and ``hapi gc`` over a real OpenStack Swift, killed in the middle."""

from __future__ import annotations

import os
import signal

import pytest
from support.harness import hapi
from support.killed_deleting import killed_deleting
from support.swift_tools import PACKED, Swift

STORE = "s3://hapi/removal"


@pytest.mark.slow
def test_removed_with_kills(swift: Swift) -> None:
    env = {**os.environ, **swift.environment}
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    rm = ["rm", f"{STORE}/digits", "--yes", "--keep-old", "0"]
    done = killed_deleting("hapi.store.remote:RemoteStore", 3, *rm, env=env)
    assert done.returncode == -signal.SIGKILL
    assert "digits" not in hapi("ls", STORE, **swift.environment).stdout
    assert "removed" in hapi("gc", STORE, "--yes", **swift.environment).stdout
    assert "every object belongs to something" in hapi("gc", STORE, **swift.environment).stdout
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    assert "sound" in hapi("verify", f"{STORE}/digits", "--quiet", **swift.environment).stdout
