"""Servers and trainers of the build before this wire version, from the repository's history, with those of today."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.harness import (
    RESNET_JOB,
    ServerProcess,
    losses,
    new_train,
    report_of,
    server,
    start_train,
    train,
    wait_for,
)
from support.http_tools import exchange, make_store, metric
from support.older_build import older_build

from hapi.wire.frames import WIRE_VERSION

pytestmark = [pytest.mark.slow, pytest.mark.long]
JOB = (*RESNET_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits")
SERVER = ("--cos-batch", "5")
ENOUGH, FEW = 1000, 2


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which a new interpreter finds the older build."""
    folder = older_build(tmp_path_factory.mktemp("older"))
    if folder is None:
        pytest.skip("the history of the wire version before is not here")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def wire_of(running: ServerProcess) -> int:
    """The newest version of frames that a server writes."""
    found: int = exchange(running.port, "GET", "/v1").json()["wire"]
    return found


def served(running: ServerProcess) -> float:
    """Requests for features that a server has answered."""
    return metric(running.port, "hapi_request_seconds_count")


def trained(url: str, path: Path, epochs: int = FEW, **env: str) -> list[float]:
    """The losses of the whole job at a server; with ``env`` of a trainer in a new interpreter."""
    arguments = (*JOB, "--epochs", str(epochs), "--server", url, "--report", str(path))
    (new_train if env else train)(*arguments, **env)
    return losses(report_of(path))


def test_servers_of_the_older_build_are_replaced_under_a_job(older: dict[str, str], tmp_path: Path) -> None:
    """A trainer of today goes on; one of the older build has the same losses at the new servers."""
    folder, path = make_store(tmp_path / "store"), tmp_path / "report.json"
    with ExitStack() as ends:
        servers = [ends.enter_context(server(folder, *SERVER, fresh=True, **older)) for _ in range(2)]
        assert [wire_of(one) for one in servers] == [WIRE_VERSION - 1] * 2
        urls = [part for one in servers for part in ("--server", one.url)]
        job = start_train(*JOB, "--epochs", str(ENOUGH), *urls, "--report", str(path))
        ends.callback(job.kill)
        for place, one in enumerate(servers):
            wait_for(lambda: all(served(s) > 5 for s in servers), 60, "requests at both servers")
            assert one.stop() == 0
            servers[place] = ends.enter_context(server(folder, *SERVER, port=one.port))
        wait_for(lambda: all(served(s) > 5 for s in servers), 60, "requests at the new servers")
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(240)
        assert job.wait() == 130, output
        found = losses(report_of(path))
        assert found == trained(servers[0].url, tmp_path / "direct.json", len(found))
        assert trained(servers[1].url, tmp_path / "older.json", **older) == found[:FEW]
