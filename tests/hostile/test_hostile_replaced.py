"""Datasets that ``hapi pack --replace`` replaces while a real server serves them to a real training."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.forked import ForkedProcess
from support.harness import DIGITS_JOB, hapi, losses, report_of, server, start_train, train, wait_for
from support.http_tools import EXTRACT, SAMPLES, Known, check_problem, exchange, make_store
from support.proxy import gated

from hapi.data.replaced import list_replaced

pytestmark = pytest.mark.slow
EPOCHS = 8
JOB = (*DIGITS_JOB, "--bs", "20", "--request-size", "10", "--dataset", "digits", "--split", "4")
IDS = [3, 39, 0, 17]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


def replace(folder: Path, *arguments: str, limit: int = 40) -> str:
    """Pack again, as the errors of damaged datasets advise; what was said."""
    done = hapi(
        "pack", "sklearn:digits", f"{folder}/digits", "--limit", str(limit), "--image-size", "32",
        "--shard-size", "2000", "--replace", "--quiet", *arguments,
    )  # fmt: skip
    return str(done.stdout + done.stderr)


def after_first_epoch(job: ForkedProcess) -> None:
    """Return when the job has told of its first epoch."""
    for line in job.stdout:
        if line.split()[:1] == ["epoch"]:
            return
    raise AssertionError("the job ended before its first epoch")


def finished(job: ForkedProcess, report: Path) -> list[float]:
    output, _ = job.communicate(240)
    assert job.returncode == 0, output
    found = report_of(report)
    assert [e["samples"] for e in found["epochs"]] == [40] * EPOCHS
    return losses(found)


@pytest.mark.parametrize("limit", [pytest.param(40, marks=pytest.mark.long), 60])
def test_a_running_job_ends_as_if_undisturbed(folder: Path, tmp_path: Path, limit: int) -> None:
    """With the same content, and with another: then new jobs get that one, also of servers that begin later."""
    known = Known(folder)
    packs = list((folder / "datasets/digits").glob("2*"))
    with server(folder, "--chunk-cache", "0") as running, gated(running.port, 8) as gate:
        undisturbed = tmp_path / "undisturbed.json"
        train(*JOB, "--epochs", str(EPOCHS), "--server", running.url, "--report", str(undisturbed))
        report = tmp_path / "report.json"
        job = start_train(*JOB, "--epochs", str(EPOCHS), "--server", gate.url, "--report", str(report))
        try:
            gate.wait()
            said = replace(folder, limit=limit)
            assert job.poll() is None
            gate.open()
            assert ("kept for running jobs" in said) == (limit != 40)
            assert all(pack.exists() == (limit != 40) for pack in packs)
            assert finished(job, report) == losses(report_of(undisturbed))
        finally:
            job.kill()
        known.check_features(exchange(running.port, "POST", EXTRACT, known.extract(IDS)).body, IDS)
        described = exchange(running.port, "GET", "/v1/datasets/digits").json()
        assert described["count"] == limit
        assert (described["reference"] == known.dataset.reference.to_json()) == (limit == 40)
        newer = tmp_path / "newer.json"
        train(*JOB, "--epochs", "1", "--server", running.url, "--report", str(newer))
        assert [e["samples"] for e in report_of(newer)["epochs"]] == [limit]
    with server(folder) as other:
        known.check_features(exchange(other.port, "POST", EXTRACT, known.extract(IDS)).body, IDS)


def test_after_the_time_is_over_one_line_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    known = Known(folder)
    with server(folder, "--chunk-cache", "0") as running:
        job = start_train(*JOB, "--epochs", "20000", "--server", running.url)
        try:
            after_first_epoch(job)
            replace(folder, "--keep-old", "200ms", limit=60)
            time.sleep(0.3)
            assert exchange(running.port, "POST", SAMPLES, known.samples()).status == 200
            replace(folder, limit=60)
            assert not list_replaced(known.store, "digits")
            for path, body in ((SAMPLES, known.samples()), (EXTRACT, known.extract(IDS))):
                answer = exchange(running.port, "POST", path, body)
                check_problem(answer, 409, "begin again with the version of now", "--keep-old")
            output, _ = job.communicate(240)
            assert job.returncode == 1 and "Traceback" not in output
            (line,) = [line for line in output.splitlines() if "error" in line]
            assert "digits" in line and "begin again" in line
        finally:
            job.kill()


def test_damage_is_repaired_without_a_restart(folder: Path) -> None:
    """What the error advises heals the server that gave it."""
    known = Known(folder)
    everything = known.samples(list(range(40)))
    with server(folder, "--chunk-cache", "0") as running:
        good = exchange(running.port, "POST", SAMPLES, everything).body
        for shard in sorted(folder.glob("datasets/digits/*/shard-*.bin")):
            shard.write_bytes(shard.read_bytes()[:-100])
        check_problem(exchange(running.port, "POST", SAMPLES, everything), 500, "pack the dataset again")
        replace(folder)
        healed = exchange(running.port, "POST", SAMPLES, everything)
        assert healed.status == 200 and len(healed.body) >= len(good) - 500
        wait_for(lambda: exchange(running.port, "POST", EXTRACT, known.extract(IDS)).status == 200)
        known.check_features(exchange(running.port, "POST", EXTRACT, known.extract(IDS)).body, IDS)


def test_a_removed_dataset_is_read_to_the_end(folder: Path, tmp_path: Path) -> None:
    with server(folder, "--chunk-cache", "0") as running, gated(running.port, 8) as gate:
        report = tmp_path / "report.json"
        job = start_train(*JOB, "--epochs", str(EPOCHS), "--server", gate.url, "--report", str(report))
        try:
            gate.wait()
            hapi("rm", f"{folder}/digits", "--yes")
            hapi("gc", str(folder), "--yes")
            gate.open()
            finished(job, report)
        finally:
            job.kill()
        check_problem(exchange(running.port, "GET", "/v1/datasets/digits"), 404, "digits")
    assert hapi("rm", f"{folder}/digits", "--yes", "--keep-old", "0").returncode == 0
    assert not list((folder / "datasets").glob("digits/*"))
