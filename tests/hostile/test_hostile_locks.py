"""Two writers of one name over a real S3 store, each in a process-id namespace of its own, as two containers of one
host name are: each has the id 1, and cannot see whether the other lives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import environment
from support.harness import hapi, wait_for
from support.swift_tools import FaultProxy, Swift, running_swift

from hapi.errors import ConflictError
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
LEASE = 4
URL = "s3://hapi/locks"


def containers_allowed() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not containers_allowed(), reason="no process-id namespaces for this user"),
]


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with running_swift(tmp_path_factory.mktemp("swift-locks"), 1, 1) as running:
        yield running


class Packer:
    """A ``hapi pack`` in a container."""

    def __init__(self, swift: Swift, name: str, *arguments: str, **store: str) -> None:
        command = [
            *CONTAINER, sys.executable, "-m", "hapi.cli.main", "pack", "sklearn:digits", f"{URL}/{name}",
            "--image-size", "32", "--shard-size", "1KiB", "--quiet", *arguments,
        ]  # fmt: skip
        patience = {
            f"HAPI_STORE_{name}_TIMEOUT": "300" for name in ("READ", "REQUEST")
        }  # while it stands still
        env = environment(**{**swift.environment, **store}, **patience, HAPI_STORE_LEASE=str(LEASE))
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def inner(self) -> int:
        """Its process as it is seen from here."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def end(self) -> tuple[int, str]:
        """(exit code, stderr)."""
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def packing(swift: Swift, name: str, *arguments: str, **store: str) -> Iterator[Packer]:
    packer = Packer(swift, name, *arguments, **store)
    try:
        yield packer
    finally:
        with contextlib.suppress(ProcessLookupError, OSError, IndexError):
            os.kill(packer.inner(), signal.SIGCONT)
        packer.kill()


@pytest.fixture(autouse=True)
def _here(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in swift.environment.items():
        monkeypatch.setenv(key, value)


@contextlib.contextmanager
def stopping(swift: Swift, name: str) -> Iterator[tuple[Packer, FaultProxy]]:
    """A writer that cannot end before the proxy between it and the store releases an answer."""
    with contextlib.closing(FaultProxy(swift.port)) as proxy:
        proxy.writes = 8
        with packing(swift, name, "--limit", "40", AWS_ENDPOINT_URL=proxy.url) as packer:
            wait_for(lambda: shards(name) > 3, 60, "the first shards")
            yield packer, proxy


def shards(name: str) -> int:
    return sum(info.key.endswith(".bin") for info in open_store(URL).list(f"datasets/{name}"))


def check_sound(swift: Swift, name: str) -> None:
    """The dataset is whole, and nothing else is left of either writer."""
    assert "sound" in hapi("verify", f"{URL}/{name}", **swift.environment).stdout
    left = [info.key.rpartition("/")[2] for info in open_store(URL).list(f"datasets/{name}")]
    assert sorted(key for key in left if not key.startswith("shard-")) == [
        "index.safetensors",
        "manifest.json",
    ]


@pytest.mark.parametrize("more", [(), pytest.param(("--replace", "--keep-old", "0"), marks=pytest.mark.long)])
def test_two_writers_at_once(swift: Swift, more: tuple[str, ...]) -> None:
    name = "replaced" if more else "new"
    with (
        packing(swift, name, "--limit", "60", *more) as first,
        packing(swift, name, "--limit", "61", *more) as second,
    ):
        ends = [first.end(), second.end()]
    codes = [code for code, _ in ends]
    assert 0 in codes and set(codes) <= {0, 1}, ends
    for code, errors in ends:
        if code:
            # The last of these where one stood still for longer than its lock lasts.
            said = ("is being written by process 1 on", "there is a dataset", "the lock of this process was")
            assert any(text in errors for text in said), errors
            assert errors.splitlines()[-1].startswith("hapi pack: error:") or errors.count("error:") == 1
    assert codes.count(0) == 1 or more, "both wrote what only one may write"
    check_sound(swift, name)


def test_a_killed_writers_lock_is_taken_over_in_bounded_time(swift: Swift) -> None:
    with stopping(swift, "killed") as (first, _):
        first.kill()
    with packing(swift, "killed", "--limit", "40") as second:
        code, errors = second.end()
    assert code == 0, errors
    assert f"its lock is held by process 1 on {os.uname().nodename}, for up to {LEASE} s" in errors
    check_sound(swift, "killed")


@pytest.mark.long
def test_a_writer_that_stood_still_ends_with_one_line(swift: Swift) -> None:
    with stopping(swift, "stood") as (first, proxy):
        os.kill(first.inner(), signal.SIGSTOP)
        with packing(swift, "stood", "--limit", "30", "--restart") as second:
            code, errors = second.end()
        assert code == 0, errors
        check_sound(swift, "stood")
        proxy.release()
        os.kill(first.inner(), signal.SIGCONT)
        code, errors = first.end()
    assert (
        code == 1 and "the lock of this process was" in errors.splitlines()[-1] and "Traceback" not in errors
    )
    check_sound(swift, "stood")


HOLDER = """
import sys, time
from hapi.errors import ConflictError
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
with open_store(sys.argv[1]).lock("d/pack.lock"):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_holder_in_another_container_of_one_folder(tmp_path: Path) -> None:
    """The kernel tells whether it lives, whatever the containers see of each other."""
    store = open_store(str(tmp_path))
    command = [*CONTAINER, sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused = pytest.raises(ConflictError, match="is being written by process 1 on")
        with refused, store.lock("d/pack.lock", force=True):
            pass
    finally:
        holder.kill()
        holder.communicate()
    wait_for(lambda: _is_free(store), 60, "the end of the container's processes")
    assert store.list() == []


def _is_free(store: ObjectStore) -> bool:
    try:
        with store.lock("d/pack.lock") as lease:
            lease.check()
    except ConflictError:
        return False
    return True
