"""Jobs at servers under Ray Serve, on this machine: the losses of one server, also when replicas die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.harness import RESNET_JOB, losses, packed_digits, report_of, server, start_train, train, wait_for
from support.http_tools import exchange, make_store, metric
from support.proxy import paced
from support.ray_fleet import listening, parent_of, running_ray

import hapi
from hapi.client.transport.fleet_list import listed_servers
from hapi.errors import HapiError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COUNT, FEW, ENOUGH = 40, 3, 1000
"""Samples; epochs of a job that nothing happens to; more epochs than a job has ended that replicas die under."""
JOB = (
    *RESNET_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits",
)  # fmt: skip
SETTINGS = {"cos_batch": 5, "threads": 1, "cpus": 0.1, "drain_seconds": 10, "share_memory": 0}

PACE = 0.1
"""Seconds between two requests at a server of the job under which replicas die."""
TOKEN = "a-token-of-the-trainers"
STEP_SECONDS, STEP_BYTES = 0.25, 20 * 64 * 8 * 8 * 4
"""A step of the trainer that scales a fleet, and the bytes of features that it takes."""


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


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_losses_are_those_of_one_server(
    proxy: str, folder: Path, alone: list[float], replicas: int, tmp_path: Path
) -> None:
    urls = deploy(proxy, folder, replicas, min_replicas=replicas)
    path = tmp_path / "report.json"
    train(*JOB, "--epochs", str(FEW), "--server", ",".join(urls), "--report", str(path))
    assert losses(report_of(path)) == alone
    answered = [exchange(port_of(url), "GET", "/v1/status").json() for url in urls]
    assert all(sum(t["served"] for t in status["tenants"]) for status in answered), "each did its part"


def test_a_killed_server_is_replaced_under_a_job(
    proxy: str, folder: Path, alone: list[float], tmp_path: Path
) -> None:
    before = deploy(proxy, folder, 2, min_replicas=2)
    first = listening(port_of(before[0]))
    path = tmp_path / "report.json"
    with ExitStack() as ends:
        urls = [ends.enter_context(paced(port_of(url), PACE)).url for url in before]
        job = start_train(*JOB, "--epochs", str(ENOUGH), "--server", ",".join(urls), "--report", str(path))
        ends.callback(job.kill)
        served = lambda: [metric(port_of(url), "hapi_samples_total") for url in before]  # noqa: E731
        wait_for(
            lambda: min(served()) > 0 and sum(served()) > 4 * COUNT, 120, "a job at work, at both servers"
        )
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(listed(proxy)) == 2 and before[0] not in listed(proxy), 180, "another server")
        samples = lambda: metric(port_of(before[1]), "hapi_samples_total")  # noqa: E731
        wait_for(lambda: samples() > (FEW + 2) * COUNT, what="some epochs")
        job.send_signal(signal.SIGINT)
        job.communicate(240)
    report = report_of(path)
    assert losses(report)[:FEW] == alone[: len(losses(report))] and len(losses(report)) >= FEW
    assert all(entry["samples"] == COUNT for entry in report["epochs"][:-1])


@pytest.mark.long
def test_a_server_ends_with_its_killed_replica(proxy: str, folder: Path) -> None:
    before = deploy(proxy, folder, 2, min_replicas=2)
    lost = listening(port_of(before[1]))
    os.kill(parent_of(lost), signal.SIGKILL)
    wait_for(lambda: before[1] not in listed(proxy) and len(listed(proxy)) == 2, 180, "another replica")
    wait_for(lambda: not Path(f"/proc/{lost}").exists(), 30, "the end of a server without its replica")


class Trainer:
    """A training loop at a fleet's list, whose steps take as long as they are told to."""

    def __init__(self, proxy: str) -> None:
        self.step_seconds, self.batches = 0.0, 0
        self._over, self._proxy = threading.Event(), proxy
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(240)

    def _train(self) -> None:
        settings = hapi.SessionSettings(
            server=(f"fleet+{self._proxy}",), dataset="digits", model="resnet18", weights="random", image_size=32,
            split="maxpool", bs=20, request_size=5, prefetch_bytes=0, cache="off", wire_codec="none",
        )  # fmt: skip
        epoch = 0
        with hapi.Session.open(settings, token=TOKEN) as session:
            while not self._over.is_set():
                for _ in session.epoch(epoch):
                    self.batches += 1
                    if self._over.wait(self.step_seconds):
                        break
                epoch += 1


def replicas() -> int:
    """Replicas of the fleet, those that start and end included."""
    from ray import serve

    (states,) = (
        deployment.replica_states
        for name, deployment in serve.status().applications["hapi"].deployments.items()
        if name == "HapiServer"
    )
    return sum(states.values())


def seen(seconds: float, enough: Callable[[], bool] = lambda: False) -> list[int]:
    """The numbers of replicas, second by second."""
    found, end = [replicas()], time.monotonic() + seconds
    while time.monotonic() < end and not enough():
        time.sleep(1)
        found.append(replicas())
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_fleet_grows_by_what_trainers_wait_and_only_then(proxy: str, tmp_path: Path) -> None:
    """Servers that may send so much each: less than three are as fast as the trainer, a quarter before.

    None is added in ten minutes in which trainers do not wait.
    """
    rate = round(STEP_BYTES / STEP_SECONDS / 2.8)
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"trainers: {{token: {TOKEN}, bytes_per_second: {rate}}}\n")
    folder = packed_digits(tmp_path / "store", 800)
    settings = {**SETTINGS, "store": str(folder), "tenants": str(tenants), "autoscale": True}
    deploy(proxy, folder, 1, **{**settings, "max_replicas": 8})
    with Trainer(proxy) as trainer:
        trainer.step_seconds = 12 * STEP_SECONDS
        wait_for(lambda: trainer.batches > 1, 120, "a trainer at work")
        assert set(seen(600)) == {1}, "it is the trainer that takes long"
        trainer.step_seconds, began = STEP_SECONDS, time.monotonic()
        grown = [*seen(240, lambda: len(listed(proxy)) >= 3), *seen(30)]
        print(f"three servers after {time.monotonic() - began:.0f} s: {grown}")
        assert grown == sorted(grown) and grown[-1] >= 3, "no server is added and taken away again"
