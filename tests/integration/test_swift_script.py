"""``scripts/swift-loopback``: what it starts it ends, what it is told wrongly it says in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.harness import wait_for
from support.swift_tools import SCRIPT, Swift, running_swift

pytestmark = pytest.mark.slow


def script(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env={**os.environ, **env}, timeout=240, check=False
    )  # fmt: skip


def test_what_is_started_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    with running_swift(folder, 1, 1) as running:
        before = running.processes()
        assert list(before) == ["account-0", "container-0", "object-0", "proxy"] and all(before.values())
        running.start()
        assert running.processes() == before
        running.kill("object-0")
        assert script("status", str(folder)).returncode == 1
        running.start()
        after = running.processes()
        assert after["object-0"] not in (None, before["object-0"]) and after["proxy"] == before["proxy"]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in after.values()), 60, "the end of all")
    socket.create_server(("127.0.0.1", running.port)).close()
    assert script("status", str(folder)).stdout.count("down") == 4
    assert script("stop", str(folder)).returncode == 0


@pytest.mark.usefixtures("swift")
def test_a_run_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    """While its processes start one by one."""
    process = subprocess.Popen(
        [str(SCRIPT), "run", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: any(tmp_path.glob("run/*.pid")), 60, "the first process")
        process.terminate()
        process.communicate(timeout=240)
        assert process.returncode == 128 + signal.SIGTERM
        assert script("status", str(tmp_path)).stdout.count("down") == 4
    finally:
        process.kill()
        script("stop", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "env", "code", "said"),
    [
        ((), {}, 2, "usage:"),
        (("start",), {}, 2, "usage:"),
        (("begin", "{}"), {}, 2, "usage:"),
        (("start", "{}"), {"SWIFT_REPLICAS": "2"}, 1, "SWIFT_REPLICAS=2 is more than SWIFT_NODES=1"),
        (("start", "{}"), {"SWIFT_NODES": "many"}, 1, "SWIFT_NODES=many: expected 1 to 16"),
        (("start", "{}", "http"), {}, 1, "port 'http': expected 1 to 65535"),
        (("stop", "{}"), {}, 1, "holds no Swift"),
    ],
)
@pytest.mark.usefixtures("swift")
def test_wrong_usage(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], code: int, said: str
) -> None:
    done = script(*(a.format(tmp_path) for a in arguments), **env)
    assert done.returncode == code and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def test_another_port_than_before(swift: Swift) -> None:
    done = script("start", str(swift.folder), "1234")
    assert done.returncode == 1 and f"was set up with port {swift.port}, not 1234" in done.stderr
