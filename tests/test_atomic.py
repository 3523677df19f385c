"""Files that are written whole or not at all, and what killed writers left of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hapi.atomic import clean_partials, partial_name, replacing, write_atomically
from hapi.living import ProcessIdentity, _boot_and_namespace

WRITER = """
import sys, time
from hapi.atomic import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def writing(target: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of writing ``target``."""
    command = [*prefix, sys.executable, "-c", WRITER, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "writing\n", process.stderr
        yield process
    finally:
        process.kill()
        process.communicate()


def namespaces_allowed() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x"
    write_atomically(target, b"first")
    with pytest.raises(RuntimeError), replacing(target) as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"first" and names(tmp_path) == ["x"]
    write_atomically(target, b"second")
    assert target.read_bytes() == b"second" and names(tmp_path) == ["x"]
    target.chmod(0o640)
    long = tmp_path / ("é" * 127)
    write_atomically(long, b"")
    assert long.exists() and len(names(tmp_path)) == 2


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    with writing(tmp_path / "checkpoint") as process:
        assert len(names(tmp_path)) == 1
        write_atomically(tmp_path / "report", b"other")
        assert len(names(tmp_path)) == 2, "a living writer's file stays"
        process.send_signal(signal.SIGKILL)
        process.wait()
        write_atomically(tmp_path / "report", b"other")
    assert names(tmp_path) == ["report"]


@pytest.mark.skipif(not namespaces_allowed(), reason="no process-id namespaces for this user")
def test_a_writer_in_another_container_counts_by_its_lock(tmp_path: Path) -> None:
    with writing(tmp_path / "checkpoint", *IN_NAMESPACE) as process:
        (partial,) = tmp_path.iterdir()
        old = time.time() - 120
        os.utime(partial, (old, old))
        assert clean_partials(tmp_path) == [], "it lives, although no process here has its id"
        assert clean_partials(tmp_path, alone=True) == []
        process.kill()
        process.wait()
        for _ in range(4800):  # the writer is a child of the process that was killed
            if clean_partials(tmp_path):
                break
            time.sleep(0.05)
    assert names(tmp_path) == []


@pytest.mark.parametrize("writer", [f"{'0' * 32}-1-1-1", "-0-7-0"])
def test_a_writer_that_cannot_be_seen_counts_by_age(tmp_path: Path, writer: str) -> None:
    foreign, own, other = (
        tmp_path / f".x.{writer}.{'a' * 12}.partial",
        tmp_path / "x",
        tmp_path / ".y.partial",
    )
    for path in (foreign, own, other):
        path.write_bytes(b"")
        os.utime(path, (time.time() - 20 * 3600,) * 2)
    assert clean_partials(tmp_path) == []
    os.utime(foreign, (time.time() - 25 * 3600,) * 2)
    assert clean_partials(tmp_path) == [foreign]
    assert names(tmp_path) == sorted([".y.partial", "x"])


def test_links_and_absent_folders_are_no_errors(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"mine")
    dead = ProcessIdentity("", *_boot_and_namespace(os.getpid()), pid=os.getpid(), started=1).to_text()
    (tmp_path / f".x.{dead}.{'a' * 12}.partial").symlink_to(kept)
    assert clean_partials(tmp_path) == [] and kept.read_bytes() == b"mine"
    assert clean_partials(tmp_path / "absent") == [] and clean_partials(tmp_path / "a\0b") == []


def test_the_identity_of_a_process_is_read_back() -> None:
    own = ProcessIdentity.current()
    assert own.lives() is True and own.shares_kernel()
    assert ProcessIdentity.from_json(own.to_json()) == own
    found = ProcessIdentity.from_text(own.to_text())
    assert found is not None and found.lives() is True and found.host == ""
    for wrong in ("", "x-1-1-1", own.to_text() + "-1", "1"):
        assert ProcessIdentity.from_text(wrong) is None
    for document in (
        {},
        {**own.to_json(), "pid": True},
        {**own.to_json(), "pid": -1},
        {**own.to_json(), "host": 1},
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            ProcessIdentity.from_json(document)
    assert f"process {os.getpid()}" in str(own)


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"started": 1}, False),
        ({"pid": 2**22 + 1}, False),
        ({"boot": "0" * 32}, None),
        ({"namespace": 1}, None),
        ({"boot": "", "namespace": 0, "started": 0}, None),
    ],
)
def test_only_processes_of_the_same_namespace_are_judged(
    change: dict[str, object], lives: bool | None
) -> None:
    own = ProcessIdentity.current()
    assert ProcessIdentity.from_json({**own.to_json(), **change}).lives() is lives


@pytest.mark.skipif(not namespaces_allowed(), reason="no process-id namespaces for this user")
def test_the_proc_of_another_namespace_tells_nothing() -> None:
    """Without a mount of its own, ``/proc`` has the ids of the namespace above."""
    code = "from hapi.living import ProcessIdentity as P; p = P.current(); print(p.namespace, p.started, p.lives())"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0 0 None\n"


def test_names_of_partials_fit(tmp_path: Path) -> None:
    for name in ("x", "é" * 127, "\udc80" * 200, "a b\nc"):
        (tmp_path / partial_name(name)).write_bytes(b"")
        assert len(os.fsencode(partial_name(name))) < 255
