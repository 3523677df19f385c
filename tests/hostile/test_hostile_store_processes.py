"""Hostile stores against real processes: servers that start, servers at work, and commands without rights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.forked import environment
from support.harness import ServerProcess, hapi, server, wait_for
from support.hostile_store import HostileStore, hostile_store
from support.hostile_tools import peak_bytes, reset_peak
from support.http_tools import SAMPLES, exchange
from support.listing_kinds import MISDEEDS

pytestmark = pytest.mark.slow

URL = "s3://bucket/x"
KINDS = {misdeed.name: misdeed.kind for misdeed in MISDEEDS}
AT_WORK = (
    "never answers", "body drips", "resets at once", "resets in the body", "speaks no HTTP", "body ends early",
    "range is shorter", "another range", "bytes of another range", "ignores ranges", "range without end", "two lengths",
    "content changes from read to read", "403 for everything", "404 for everything", "429 for everything",
    "503 and come back in thirty years", "error of a megabyte with escapes", "redirects to itself",
)  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a dataset of 300 samples in 5 shards."""
    folder = tmp_path_factory.mktemp("packed")
    samples = np.random.default_rng(0).integers(0, 256, (300, 64), dtype=np.uint8)
    np.savez(folder / "xy.npz", x=samples, y=np.arange(300) % 7)
    hapi("pack", str(folder / "xy.npz"), str(folder / "store" / "small"), "--shard-size", "4096", "--quiet")
    return folder


@pytest.fixture
def store(packed: Path) -> Iterator[HostileStore]:
    """The same store by S3, honest at first."""
    top = packed / "store"
    objects = {f"x/{path.relative_to(top)}": path.read_bytes() for path in top.rglob("*") if path.is_file()}
    with hostile_store(objects) as running:
        yield running


@pytest.mark.parametrize(
    "name", ["never answers", "403 for everything", "speaks no HTTP", "redirects to itself"]
)
def test_a_server_does_not_start(store: HostileStore, name: str, tmp_path: Path) -> None:
    store.kind = KINDS[name]
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="the server said ''"), server(URL, log=log, **store.settings()):
        pass
    assert len(log.read_text().splitlines()) == 1, log.read_text()
    assert log.read_text().startswith(f"hapi-server: error: {URL}") and log.read_text().strip().isprintable()


def test_a_server_at_work(packed: Path, store: HostileStore, tmp_path: Path) -> None:
    """It answers each request soon, with the truth or with one line, and is as before when the store is."""
    log = tmp_path / "log"
    arguments = ("--chunk-cache", "0", "--max-running", "2")
    with server(URL, *arguments, log=log, **store.settings()) as running:
        ask(running, packed, store, 200)
        before = reset_peak(running.process.pid), descriptors(running)
        for name in AT_WORK:
            store.kind = KINDS[name]
            ask(running, packed, store)
            store.kind = None
            ask(running, packed, store, 200)
        assert peak_bytes(running.process.pid) - before[0] < 200 << 20
        wait_for(lambda: descriptors(running) <= before[1] + 8, 10, "descriptors as before")
        assert running.stop() == 0
    assert "Traceback" not in log.read_text() and len(log.read_bytes()) < 100_000


def ask(running: ServerProcess, packed: Path, store: HostileStore, status: int | None = None) -> None:
    """One request, and what may come of it."""
    version = json.loads(store.objects["x/datasets/small/manifest.json"])["version"]
    body = {"dataset": {"name": "small", "version": version}, "ids": [0, 100, 299]}
    answer = exchange(running.port, "POST", SAMPLES, body)
    for _ in range(5):  # while this machine stands still, the truth comes too late
        if status is not None and answer.status != status:
            answer = exchange(running.port, "POST", SAMPLES, body)
    stored = np.load(packed / "xy.npz")["x"][[0, 100, 299]].tobytes()
    assert status is None or (answer.status == status and stored in answer.body), answer
    assert (answer.status == 200 and stored in answer.body) or b"urn:hapi:problem:" in answer.body
    assert b"urn:hapi:problem:internal" not in answer.body, answer.body[-1000:]


def descriptors(running: ServerProcess) -> int:
    return len(list(Path(f"/proc/{running.process.pid}/fd").iterdir()))


@pytest.mark.parametrize("what", ["datasets/small/manifest.json", "datasets/small", "datasets"])
def test_what_may_not_be_read(packed: Path, tmp_path: Path, what: str) -> None:
    """As a user without the right, which root is when that capability is taken away."""
    store = tmp_path / "store"
    shutil.copytree(packed / "store", store)
    (store / what).chmod(0)
    command = [sys.executable, "-m", "hapi.cli.main", "verify", f"{store}/small", "--quiet"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv to take root's rights away")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=environment(), check=False
        )
    finally:
        (store / what).chmod(0o755)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done
    assert "Permission denied" in done.stderr and "Traceback" not in done.stderr
