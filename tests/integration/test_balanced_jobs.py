"""Jobs through nginx and HAProxy as ``deploy/`` configures them, two servers behind: the same losses as without."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.balancers import KINDS, Balancer, balanced, installed
from support.forked import ForkedProcess
from support.harness import DIGITS_JOB, ServerProcess, losses, report_of, server, start_train, train, wait_for
from support.http_tools import exchange, make_store, metric
from support.proxy import paced

from hapi.wire.frames import WIRE_VERSION

pytestmark = pytest.mark.slow
COUNT, FEW, ENOUGH = 40, 3, 20_000
"""Samples; epochs of a job that nothing happens to, and requests that show a server at work; more epochs than a job
has ended that servers restart under."""
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits",
    "--timeout", "600",
)  # fmt: skip
SERVER = ("--cos-batch", "5")
"""One frame a request, so that a request that is made again is computed as it was."""
PACE = 0.1
"""Seconds between two requests of that job."""
_FAILED = re.compile(rb"HTTP/1\.1 5\d\d ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


def direct(folder: Path, path: Path, epochs: int) -> list[float]:
    """The losses of the job at a server without anything between."""
    with server(folder, *SERVER) as running:
        train(*JOB, "--epochs", str(epochs), "--server", running.url, "--report", str(path))
    return losses(report_of(path))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return installed(str(request.param))


@contextmanager
def fleet(
    kind: str, folder: Path, tmp_path: Path, **options: Any
) -> Iterator[tuple[Balancer, list[ServerProcess]]]:
    """Two servers behind a balancer; those that a test puts into the list's places are ended too."""
    servers: list[ServerProcess] = []
    try:
        with ThreadPoolExecutor(2) as side_by_side:
            logs = [tmp_path / f"log{n}" for n in range(2)]
            starts = [side_by_side.submit(ServerProcess, folder, *SERVER, log=log, **options) for log in logs]
        servers += [one.result() for one in starts]
        with balanced(kind, tmp_path / kind, [one.port for one in servers]) as balancer:
            yield balancer, servers
    finally:
        for one in servers:
            if one.process.poll() is None:
                one.kill()


def wire_of(one: ServerProcess) -> int:
    """The newest version of frames that it writes."""
    found: int = exchange(one.port, "GET", "/v1").json()["wire"]
    return found


def served(one: ServerProcess) -> float:
    """Requests for features that it has answered."""
    return metric(one.port, "hapi_request_seconds_count")


@contextmanager
def job(balancer: Balancer, path: Path, failed: list[bytes]) -> Iterator[ForkedProcess]:
    """The job, under way until the end of the block: how long servers take to restart there decides nothing.

    ``failed`` gets the beginnings of the errors that it is answered with.
    """

    def seen(data: bytes) -> bytes:
        failed.extend(_FAILED.findall(data))
        return data

    with paced(balancer.port, PACE, seen) as proxy:
        running = start_train(*JOB, "--epochs", str(ENOUGH), "--server", proxy.url, "--report", str(path))
        try:
            yield running
            assert running.poll() is None, running.communicate(1)[0]
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(240)
            assert running.wait() == 130, output
        finally:
            running.kill()


def check(folder: Path, path: Path, failed: int) -> None:
    """All samples in all epochs, the losses of a run without a balancer, a retry for each error and none besides."""
    report = report_of(path)
    found = losses(report)
    assert found == direct(folder, path.with_name("direct.json"), len(found))
    assert [epoch["samples"] for epoch in report["epochs"]] == [COUNT] * len(found)
    assert report["retries"] <= failed


def test_the_same_losses(kind: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with fleet(kind, folder, tmp_path) as (balancer, servers):
        train(*JOB, "--epochs", str(FEW), "--server", balancer.url, "--report", str(path))
        assert all(served(one) > FEW for one in servers)
    check(folder, path, failed=0)


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        pytest.param("nginx", "same", marks=pytest.mark.long),
        ("nginx", "older"),
        ("haproxy", "same"),
        pytest.param("haproxy", "older", marks=pytest.mark.long),
    ],
    indirect=["kind"],
)
def test_a_rolling_restart(kind: str, before: str, folder: Path, tmp_path: Path) -> None:
    """Both servers drain and come again, one after the other; in between one of them is alone, or of an older hapi."""
    path, failed = tmp_path / "report.json", list[bytes]()
    options = {"module": "support.older_server"} if before == "older" else {}
    with fleet(kind, folder, tmp_path, **options) as (balancer, servers), job(balancer, path, failed):
        spoken = [wire_of(one) for one in servers]
        assert spoken == [WIRE_VERSION - (before == "older")] * 2
        for place in range(2):
            wait_for(lambda: all(served(one) > FEW for one in servers), 120, "requests at both servers")
            assert servers[place].stop() == 0
            alone = servers[1 - place]
            before = served(alone)
            wait_for(lambda one=alone, count=before: served(one) > count + FEW, 120, "requests at the other")  # type: ignore[misc]
            servers[place] = servers[place].restarted()
        wait_for(lambda: all(served(one) > FEW for one in servers), 120, "requests at the restarted servers")
        assert [wire_of(one) for one in servers] == [WIRE_VERSION] * 2
    check(folder, path, len(failed))
