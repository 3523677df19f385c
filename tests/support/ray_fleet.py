"""A Ray of its own for tests: small, on free ports, without dashboard and usage statistics, ended whatever happens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.forked import environment
from support.free_ports import free_port

STORE_BYTES = 80 << 20
"""Of Ray's object store, which is not used: features do not pass it."""


@contextmanager
def running_ray() -> Iterator[str]:
    """Ray and Serve on this machine; the address of Serve's proxy."""
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # this machine may be slow
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment().keys():
            patch.delenv(name)
        for name, value in environment(**quiet).items():
            patch.setenv(name, value)
        import ray
        from ray import serve

        port = free_port()
        # A short path: names of sockets have at most 107 bytes.
        with tempfile.TemporaryDirectory(prefix="hray", dir="/tmp", ignore_cleanup_errors=True) as folder:
            try:
                _begin(ray, folder)
                serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
                yield f"http://127.0.0.1:{port}"
            finally:
                with suppress(Exception):
                    serve.shutdown()
                ray.shutdown()


def _begin(ray: Any, folder: str) -> None:
    """Start it, once more where this machine is too slow: Ray waits for itself for 30 seconds."""
    for last in (False, False, True):
        try:
            ray.init(
                num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
                _temp_dir=folder, configure_logging=False, _node_ip_address="127.0.0.1",
            )  # fmt: skip
            return
        except Exception as error:
            if last or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def listening(port: int) -> int:
    """The process that listens on a port of the loopback, by Linux's list of sockets."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state, inode = (line.split()[n] for n in (1, 3, 9))
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):
                    if str(descriptor.readlink()) == f"socket:[{inode}]":
                        return int(descriptor.parts[2])
    raise AssertionError(f"nothing listens on {port}")


def parent_of(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
