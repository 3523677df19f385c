"""Jobs at servers under Ray Serve, on this machine: the losses of one server, also when replicas die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import DIGITS_JOB, losses, report_of, server, start_train, train, wait_for
from support.http_tools import exchange, make_store, metric
from support.ray_fleet import listening, parent_of, running_ray

from hapi.client.transport.fleet_list import listed_servers
from hapi.errors import HapiError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COUNT, FEW, ENOUGH = 40, 3, 1000
"""Samples; epochs of a job that nothing happens to; more epochs than a job has ended that replicas die under."""
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits",
)  # fmt: skip
SETTINGS = {"cos_batch": 5, "threads": 1, "cpus": 0.1, "drain_seconds": 10, "share_memory": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    with running_ray() as url:
        yield url


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job at one server without Ray."""
    path = tmp_path_factory.mktemp("alone") / "report.json"
    with server(folder, "--cos-batch", "5") as running:
        train(*JOB, "--epochs", str(FEW), "--server", running.url, "--report", str(path))
    return losses(report_of(path))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def listed(proxy: str) -> list[str]:
    try:
        return listed_servers(proxy)
    except HapiError:
        return []


def deploy(proxy: str, folder: Path, replicas: int, **settings: Any) -> list[str]:
    """The servers of a fleet of so many."""
    from ray import serve

    from hapi.cluster.ray_serve import app

    made = app({"store": str(folder), "replicas": replicas, "max_replicas": replicas, **SETTINGS, **settings})
    serve.run(made, name="hapi")
    wait_for(lambda: len(listed(proxy)) == replicas, 120, f"a list of {replicas}")
    return listed(proxy)


@pytest.mark.parametrize("replicas", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_the_losses_are_those_of_one_server(
    proxy: str, folder: Path, alone: list[float], replicas: int, tmp_path: Path
) -> None:
    urls = deploy(proxy, folder, replicas, min_replicas=replicas)
    path = tmp_path / "report.json"
    train(*JOB, "--epochs", str(FEW), "--server", ",".join(urls), "--report", str(path))
    assert losses(report_of(path)) == alone
    answered = [exchange(port_of(url), "GET", "/v1/status").json() for url in urls]
    assert all(sum(t["served"] for t in status["tenants"]) for status in answered), "each did its part"


def test_a_killed_replica_is_replaced_under_a_job(
    proxy: str, folder: Path, alone: list[float], tmp_path: Path
) -> None:
    """First a server dies, then the process of Ray that has the other one: that one's server ends with it."""
    before = deploy(proxy, folder, 2, min_replicas=2)
    servers = [listening(port_of(url)) for url in before]
    path = tmp_path / "report.json"
    job = start_train(*JOB, "--epochs", str(ENOUGH), "--server", ",".join(before), "--report", str(path))
    try:
        wait_for(lambda: metric(port_of(before[0]), "hapi_samples_total") > 2 * COUNT, 120, "a job at work")
        os.kill(servers[0], signal.SIGKILL)
        wait_for(lambda: len(listed(proxy)) == 2 and before[0] not in listed(proxy), 180, "another server")
        job.send_signal(signal.SIGINT)
        job.communicate(60)
    finally:
        job.kill()
    report = report_of(path)
    assert losses(report)[:FEW] == alone[: len(losses(report))] and len(losses(report)) >= FEW
    assert all(entry["samples"] == COUNT for entry in report["epochs"][:-1])
    os.kill(parent_of(servers[1]), signal.SIGKILL)
    wait_for(lambda: not set(before) & set(listed(proxy)) and len(listed(proxy)) == 2, 180, "another replica")
    wait_for(lambda: not Path(f"/proc/{servers[1]}").exists(), 30, "the end of a server without its replica")
