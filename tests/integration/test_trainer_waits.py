"""What servers export of their trainers' wait: nothing where the trainer is the bottleneck, however long the queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.http_tools import EXTRACT, Known, ServedApplication, exchange, make_store, metric, served, until

from hapi.client.session import Session
from hapi.client.settings import SessionSettings

pytestmark = pytest.mark.slow
WAIT, EXPECTED = "hapi_trainer_wait_seconds", "hapi_tenant_expected_wait_seconds"
IDS = list(range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@contextmanager
def training(server: ServedApplication, step_seconds: float) -> Iterator[None]:
    """A training loop, whose steps take so long, in the block."""
    over = threading.Event()
    settings = SessionSettings(
        server=(f"http://127.0.0.1:{server.port}",), dataset="digits", model="resnet18", weights="random",
        image_size=32, split="maxpool", bs=4, request_size=1, prefetch_bytes=0, cache="off",
    )  # fmt: skip

    def train() -> None:
        with Session.open(settings) as session:
            epoch = 0
            while not over.is_set():
                for _ in session.epoch(epoch):
                    over.wait(step_seconds)
                epoch += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(240)


@contextmanager
def crowd(server: ServedApplication, known: Known, clients: int) -> Iterator[None]:
    """Clients that ask without a pause, and tell nothing of themselves."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            exchange(server.port, "POST", EXTRACT, known.extract(IDS[:4]))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(240)


def readings(server: ServedApplication, name: str, seconds: float) -> list[float]:
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        found.append(metric(server.port, name))
        time.sleep(0.05)
    return found


def test_a_server_that_trainers_wait_for(folder: Path) -> None:
    with served(folder, max_running=1, cos_batch=1, threads=1) as server, training(server, 0.0):
        until(lambda: metric(server.port, WAIT) > 0, 60, "a trainer's wait")
        trainers = lambda: exchange(server.port, "GET", "/v1/status").json()["trainers"]  # noqa: E731
        until(lambda: trainers()["stalled"] > 0.1, 60, "a trainer that stands still for a tenth of its time")
        assert trainers()["jobs"] == 1
        (tenant,) = exchange(server.port, "GET", "/v1/status").json()["tenants"]
        assert 0 <= tenant["trainer_wait"] <= 600


def test_a_trainer_that_computes_for_long_waits_for_no_server(folder: Path) -> None:
    known = Known(folder)
    with (
        served(folder, max_running=1, cos_batch=1, threads=1) as server,
        crowd(server, known, 6),
        training(server, 1.5),
    ):
        jobs = lambda: exchange(server.port, "GET", "/v1/status").json()["trainers"]["jobs"]  # noqa: E731
        until(lambda: jobs() == 1, 60, "a trainer that tells of itself")

        def hardly_waits() -> bool:
            """Whether there is a queue, and not for the trainer; while this machine stands still, it waits, too."""
            expected, waits = readings(server, EXPECTED, 2.0), readings(server, WAIT, 2.0)
            return sum(waits) / len(waits) < 0.1 * sum(expected) / len(expected)

        until(hardly_waits, 60, "a trainer that hardly waits beside a queue")
