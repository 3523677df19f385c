"""Training through trouble of every kind: the same losses to the last digit, and nothing left behind."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chaos_tools import (
    Settled,
    Trouble,
    crowding,
    failing_store,
    garbage,
    scarce_memory,
    trickling,
    vanishing,
)
from support.harness import DIGITS_JOB, RESNET_JOB, hapi, losses, report_of, server, start_train, train
from support.http_tools import Known, ServedApplication, make_store, metric, served, until
from support.local_job import ALLOWED
from support.proxy import Proxy

pytestmark = pytest.mark.slow
EPOCHS, ENOUGH = 12, 20_000
"""And more than a job has ended whose server is killed."""
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool",
    "--dataset", "digits",
)  # fmt: skip
COS_BATCH = 5
"""One frame a request, so that a request which is made again is computed as it was: other sizes of a COS batch round
differently."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hapi(
        "--version"
    )  # the process that trainers are forked from takes descriptors of this one, which are counted
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def known(folder: Path) -> Known:
    return Known(folder)


@contextlib.contextmanager
def harried(folder: Path, known: Known) -> Iterator[tuple[ServedApplication, Settled]]:
    """A small server that drops slow readers soon, and what it must come back to."""
    settings: dict[str, Any] = {
        "cos_batch": COS_BATCH,
        "max_running": 2,
        "max_queued": 6,
        "allow_model": ALLOWED,
    }
    with served(folder, **settings, slow_reader_seconds=1.0, send_timeout=5.0) as application:
        Settled(application).check(known)  # its threads are there, its layers are loaded
        yield application, Settled(application)


def trained(application: ServedApplication, path: Path, epochs: int = EPOCHS) -> list[float]:
    """The losses of a whole run."""
    url = f"http://127.0.0.1:{application.port}"
    train(*JOB, "--epochs", str(epochs), "--server", url, "--report", str(path))
    report = report_of(path)
    assert [epoch["samples"] for epoch in report["epochs"]] == [40] * epochs
    return losses(report)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, known: Known, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happens to."""
    with harried(folder, known) as (application, settled):
        found = trained(application, tmp_path_factory.mktemp("report") / "report.json")
        settled.check(known)
    return found


@contextlib.contextmanager
def under(application: ServedApplication, known: Known, *kinds: Trouble) -> Iterator[None]:
    """All these troubles at the same time."""
    over, failures = threading.Event(), list[BaseException]()

    def run(kind: Trouble) -> None:
        try:
            kind(application, known, over)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("kind", "epochs"), [(vanishing, 6), (trickling, EPOCHS), (garbage, 6), (crowding, 3)]
)
def test_troublesome_clients(
    folder: Path, known: Known, undisturbed: list[float], tmp_path: Path, kind: Trouble, epochs: int
) -> None:
    with harried(folder, known) as (application, settled):
        with under(application, known, kind):
            if kind is trickling:  # so that the training has to wait for a slot
                until(
                    lambda: metric(application.port, "hapi_requests_running") == 2, 60, "readers in all slots"
                )
            assert trained(application, tmp_path / "report.json", epochs) == undisturbed[:epochs]
            if kind is crowding:
                until(lambda: metric(application.port, "hapi_tenant_shed_total") > 0, 60, "some sent away")
        settled.check(known)
        if kind is trickling:
            assert metric(application.port, "hapi_dropped_readers_total") > 0


def test_a_store_that_fails_and_stalls(
    folder: Path, known: Known, undisturbed: list[float], tmp_path: Path
) -> None:
    with harried(folder, known) as (application, settled):
        with failing_store(0.1, 0.3) as happened:
            assert trained(application, tmp_path / "report.json") == undisturbed
        assert happened.count("error") > 5 and happened.count("stall") > 5
        settled.check(known)


def test_a_device_that_runs_out_of_memory(
    folder: Path, known: Known, undisturbed: list[float], tmp_path: Path
) -> None:
    """Smaller COS batches round differently, so that this one is equal to the rounding of float32."""
    with harried(folder, known) as (application, settled):
        with scarce_memory(0.1) as happened:
            found = trained(application, tmp_path / "report.json")
        assert found == pytest.approx(undisturbed, rel=1e-5)
        assert len(happened) == application.service.workers.all[0].device.out_of_memory_caught > 0
        settled.check(known)


@pytest.mark.long
def test_everything_at_once(folder: Path, known: Known, undisturbed: list[float], tmp_path: Path) -> None:
    with harried(folder, known) as (application, settled):
        with failing_store(0.03, 0.1), under(application, known, vanishing, trickling, garbage, crowding):
            assert trained(application, tmp_path / "report.json") == undisturbed
        settled.check(known)


def test_a_server_killed_again_and_again(folder: Path, undisturbed: list[float], tmp_path: Path) -> None:
    """SIGKILL in the middle of the work, wherever that is, and another process in its place."""
    how, report = random.Random(5), tmp_path / "report.json"
    flags = ("--cos-batch", str(COS_BATCH))
    with contextlib.ExitStack() as servers:
        running = servers.enter_context(server(folder, *flags))
        job = start_train(*JOB, "--epochs", str(ENOUGH), "--server", running.url, "--report", str(report))
        servers.callback(job.kill)
        for _ in range(3):
            port, some = int(running.url.rpartition(":")[2]), how.randint(5, 60)
            until(lambda port=port, some=some: metric(port, "hapi_samples_total") >= some, 60, "some work")
            threading.Event().wait(how.uniform(0, 0.05))
            running.kill()
            # The trainer needs the next samples long before that.
            threading.Event().wait(how.uniform(0.3, 1.0))
            running = running.restarted()
            servers.callback(lambda one=running: one.process.poll() is None and one.kill())
        port = int(running.url.rpartition(":")[2])
        until(lambda: metric(port, "hapi_samples_total") >= 100, 60, "the end of the last outage")
        job.send_signal(signal.SIGINT)
        output = job.communicate()[0]
        assert job.returncode == 130, output
    document = report_of(report)
    found = losses(document)
    assert len(found) > 2 and found[:EPOCHS] == undisturbed[: len(found)]
    assert document["retries"] > 0


def test_a_trainer_behind_a_scarce_link_goes_on_where_it_was_dropped(
    folder: Path, known: Known, tmp_path: Path
) -> None:
    """A server that asks far too much of its readers drops this one again and again; its training does not change."""

    def slowly(data: bytes) -> bytes:
        threading.Event().wait(len(data) / 6e6)
        return data

    job = (
        *RESNET_JOB, "--dataset", "digits", "--image-size", "128", "--split", "conv1", "--bs", "20",
        "--request-size", "20", "--epochs", "1",
    )  # fmt: skip
    settings: dict[str, Any] = {"cos_batch": 1, "max_running": 1, "slow_reader_seconds": 0.5}
    with served(folder, **settings, slow_reader_rate=1 << 30) as application:
        found = []
        with contextlib.closing(Proxy(application.port, slowly, 1 << 16)) as proxy:
            for port in (application.port, proxy.port):
                path = tmp_path / f"{port}.json"
                train(*job, "--server", f"http://127.0.0.1:{port}", "--report", str(path))
                found.append(losses(report_of(path)))
        assert metric(application.port, "hapi_dropped_readers_total") > 0
        assert found[0] == found[1]
        application.idle()
        Settled(application).check(known)
