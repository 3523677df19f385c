"""The whole over a real OpenStack Swift: one node, and three with three copies; stores that die and come back.

Requests of the size of a COS batch make one frame each, so that losses at one split are equal to the last digit however
often a request is made again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import ServerProcess, hapi, losses, report_of, server, start_train
from support.http_tools import metric, until
from support.swift_tools import JOB, ONE, PACKED, SAMPLES, SERVER, SPLIT, Swift, trained

from hapi.errors import ConflictError, NotFoundError, StoreError
from hapi.store.base import ReadPart
from hapi.store.coalesce import SLICE_BYTES
from hapi.store.open import open_store

pytestmark = pytest.mark.slow
COPIES = "s3://hapi/deep/er"


@pytest.fixture
def environment(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process reaches the one-node Swift."""
    for name, value in swift.environment.items():
        monkeypatch.setenv(name, value)
    yield


@pytest.mark.usefixtures("environment")
def test_objects() -> None:
    """What ``tests/store/test_objects.py`` holds against the other stores."""
    store = open_store("s3://hapi/objects")
    assert store.list() == [] and store.list_names("") == []
    large = bytes(range(256)) * (SLICE_BYTES // 256) + b"end"
    store.put("a/large", large)
    store.put("a/b/small", b"0123456789")
    store.put("a-not/x", b"")
    outs = [bytearray(n) for n in (len(large), 4, 3)]
    store.read_many(
        [
            ReadPart("a/large", 0, memoryview(outs[0])),
            ReadPart("a/b/small", 6, memoryview(outs[1])),
            ReadPart("a/b/small", 0, memoryview(outs[2])),
        ]
    )
    assert [bytes(out) for out in outs] == [large, b"6789", b"012"]
    assert store.get("a-not/x") == b"" and store.size("a/large") == len(large)
    assert [(i.key, i.size) for i in store.list("a")] == [("a/b/small", 10), ("a/large", len(large))]
    assert store.list_names("") == ["a", "a-not"] and store.list_names("a") == ["b"]
    for start, length in ((5, 6), (10, 1), (1000, 4)):
        with pytest.raises(StoreError, match=r"a/b/small.* shorter"):
            store.read_into("a/b/small", start, memoryview(bytearray(length)))
    for call in (store.get, store.size, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
        with pytest.raises(NotFoundError, match="s3://hapi/objects/nothing"):
            call("nothing")
    with store.lock("a/lock"), pytest.raises(ConflictError, match="force-lock"), store.lock("a/lock"):
        pass
    for info in store.list():
        store.delete(info.key)
        store.delete(info.key)
    assert store.list() == []


def test_one_node(packed: Swift, undisturbed: list[float], tmp_path: Path) -> None:
    """Listed, verified, served; the same losses as from a folder, with and without a part of the model there."""
    listed = json.loads(hapi("ls", ONE, "--json", **packed.environment).stdout)["datasets"]
    assert [(d["name"], d["state"], d["samples"]) for d in listed] == [("digits", "whole", SAMPLES)]
    assert listed[0]["shards"] > 5
    assert ": sound" in hapi("verify", f"{ONE}/digits", "--quiet", **packed.environment).stdout
    with server(ONE, *SERVER, **packed.environment) as running:
        assert trained(running, SPLIT, tmp_path / "pushed.json") == undisturbed
        check_stored(trained(running, "0", tmp_path / "stored.json"), undisturbed)


def test_the_store_is_killed_and_started_again(
    packed: Swift, undisturbed: list[float], tmp_path: Path
) -> None:
    """Every process of it, at the first batch and in a later epoch; training waits, and its losses are the same."""
    report = tmp_path / "report.json"
    with server(ONE, *SERVER, **packed.environment) as running:
        job = begun(running, report)
        try:
            for sign in ("data ", "epoch   1"):
                read_until(job, sign)
                packed.kill()
                if sign == "data ":
                    until(lambda: metric(running.port, "hapi_errors_total") > 0, 60, "a failed read")
                packed.start()
            output = job.communicate(timeout=240)[0]
        finally:
            job.kill()
            packed.start()
        assert job.returncode == 0, output
    document = report_of(report)
    assert losses(document) == undisturbed
    assert document["retries"] > 0


def test_a_storage_node_dies_for_good(swift_copies: Swift, undisturbed: list[float], tmp_path: Path) -> None:
    """Two of three copies are left: training goes on, and another one finds everything."""
    env = swift_copies.environment
    hapi("pack", "sklearn:digits", f"{COPIES}/digits", *PACKED, **env)
    report = tmp_path / "report.json"
    try:
        with server(COPIES, *SERVER, **env) as running:
            job = begun(running, report)
            try:
                read_until(job, "data ")
                swift_copies.kill("account-1", "container-1", "object-1")
                output = job.communicate(timeout=240)[0]
            finally:
                job.kill()
            assert job.returncode == 0, output
            assert losses(report_of(report)) == undisturbed
            check_stored(trained(running, "0", tmp_path / "stored.json"), undisturbed)
        hapi("pack", "sklearn:digits", f"{COPIES}/more", *PACKED, **env)
        done = hapi("verify", f"{COPIES}/more", "--quiet", code=None, **env)
        assert done.stdout, done.stderr
        *findings, verdict = done.stdout.splitlines()
        # What was deleted while a node was away may come back: Swift deletes later what it could not at once.
        assert all(line.endswith("it can be removed") for line in findings), findings
        assert findings or ": sound" in verdict, verdict
    finally:
        swift_copies.start()


def begun(running: ServerProcess, report: Path) -> subprocess.Popen[str]:
    """A training at ``SPLIT`` that is under way."""
    job = (*JOB, "--split", SPLIT, "--server", running.url, "--report", str(report))
    return start_train(*job, PYTHONUNBUFFERED="1")


def check_stored(found: list[float], undisturbed: list[float]) -> None:
    """With nothing pushed down this side computes all layers in batches of its own size, which rounds differently."""
    assert found == pytest.approx(undisturbed, rel=1e-4)


def read_until(job: subprocess.Popen[str], sign: str) -> None:
    """Read what the job says until a line begins with ``sign``."""
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith(sign):
            return
    raise AssertionError(f"the job ended without a line that begins with {sign!r}")
