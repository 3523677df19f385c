"""A running server whose S3 keys are replaced on disk during a job: the job goes on with the same losses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import DIGITS_JOB, losses, report_of, server, start_train, train
from support.http_tools import make_store, metric, until
from support.hung_store import BUCKET, HungStore, hung_store

pytestmark = pytest.mark.slow
ENOUGH = 20_000
"""More epochs than a job has ended whose keys are replaced."""
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits",
)  # fmt: skip
SERVER = ("--cos-batch", "5", "--chunk-cache", "0")
"""Every request reads the store, and is one frame, so that one that is made again is computed as it was."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HungStore]:
    with hung_store(make_store(tmp_path / "store")) as running:
        yield running


def install(folder: Path, key: str) -> None:
    """Replace the keys as ``aws configure`` and what renews roles do: a whole file at once."""
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t-{key}\n"
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / "credentials")


def of_profile(store: HungStore, folder: Path) -> dict[str, str]:
    """The environment of a server that has its keys from files in ``folder``."""
    environment = {name: value for name, value in store.environment.items() if "KEY" not in name}
    files = {name: str(folder / file) for name, file in (
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"),
    )}  # fmt: skip
    return {**environment, **files}


def test_keys_are_replaced_during_a_job(store: HungStore, tmp_path: Path) -> None:
    """Once in time, so that nothing is refused, and once when the old ones have been refused for a while."""
    install(tmp_path, "FIRST")
    store.accepted = {"FIRST"}
    report, direct = tmp_path / "report.json", tmp_path / "direct.json"
    log = tmp_path / "log"
    with server(f"s3://{BUCKET}", *SERVER, log=log, **of_profile(store, tmp_path)) as running:
        job = start_train(*JOB, "--epochs", str(ENOUGH), "--server", running.url, "--report", str(report))
        try:
            answered = lambda: metric(running.port, "hapi_request_seconds_count")  # noqa: E731
            until(lambda: answered() > 8, 60, "answers with the first keys")
            store.accepted = {"FIRST", "SECOND"}
            install(tmp_path, "SECOND")
            until(lambda: "SECOND" in store.keys, 20, "requests with the second keys")
            before = answered()
            store.accepted = {"SECOND"}
            until(lambda: answered() > before + 8, 60, "answers with the second keys")
            assert store.refused == 0, "keys that overlap are never missed"
            store.accepted = {"THIRD"}
            until(lambda: store.refused > 30, 60, "more refusals than damaged answers are borne")
            assert job.poll() is None, "a trainer waits for its server's keys"
            before = answered()
            install(tmp_path, "THIRD")
            until(lambda: answered() > before + 8, 60, "answers with the third keys")
            job.send_signal(signal.SIGINT)
            output, _ = job.communicate()
        finally:
            job.kill()
        assert job.wait() == 130, output
        assert running.process.poll() is None
    assert report_of(report)["retries"] > 0
    found = losses(report_of(report))
    train(*JOB, "--epochs", str(len(found)), "--store", str(store.folder), "--report", str(direct))
    assert found == losses(report_of(direct))
    assert "Traceback" not in log.read_text()
