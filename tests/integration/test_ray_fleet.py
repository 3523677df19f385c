"""Jobs at servers under Ray Serve, on this machine: the losses of one server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import DIGITS_JOB, losses, report_of, server, train, wait_for
from support.http_tools import exchange, make_store
from support.ray_fleet import running_ray

from hapi.cluster.discovery import listed_servers
from hapi.errors import HapiError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
FEW = 3
"""Epochs."""
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
    wait_for(lambda: len(listed(proxy)) == replicas, 60, f"a list of {replicas}")
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
