"""A server whose code changes in the middle of a run: no feature of other code is kept under the run's key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.local_job import Silent, open_session, pack_blobs, service_of

from hapi.client.caching.code_watch import OLDER, OTHER
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.trainer import Trainer
from hapi.wire.frames import Buffer
from hapi.wire.messages import CODE_HEADER, EXTRACT_PATH

SAMPLES, BATCH = 48, 16
JOB: dict[str, Any] = {
    "bs": BATCH, "request_size": BATCH, "in_flight": 1, "epochs": 3, "dataset": "blobs", "cache": "auto", "freeze": 12,
    "split": 12, "weights": "random:0",
}  # fmt: skip
OLD, NEW = "a" * 16, "b" * 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("upgraded") / "store"
    pack_blobs(store, count=SAMPLES)
    with service_of(store) as running:
        yield running


class Upgraded:
    """Answers as a service of old code does, and from request ``at`` on as one of new code, or of an older hapi."""

    def __init__(self, service: Service, at: int, code: str | None = NEW) -> None:
        self._service, self._handle = service, loopback_handler(service)
        self._at, self._code = at, code
        self.asked = 0
        service.code = OLD

    def __call__(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        if path == EXTRACT_PATH:
            if self.asked == self._at:
                self._service.code = self._code or OLD
            self.asked += 1
        status, headers, buffers = self._handle(method, path, body)
        if self._code is None and self.asked > self._at:
            headers = {name: value for name, value in headers.items() if name != CODE_HEADER}
        return status, headers, buffers


def train(handler: Upgraded, folder: Path, **changes: Any) -> dict[str, Any]:
    with open_session(handler, **{**JOB, "cache_dir": str(folder), **changes}) as session:  # type: ignore[arg-type]
        return Trainer(session, callbacks=[Silent()]).run()


def of_epochs(report: dict[str, Any], name: str) -> list[Any]:
    return [epoch[name] for epoch in report["epochs"]]


@pytest.mark.slow
def test_what_other_code_computed_gets_a_key_of_its_own(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = train(Upgraded(service, at=1), tmp_path / "cache")
    told = [record.getMessage() for record in caplog.records if OTHER in record.getMessage()]
    assert len(told) == 1 and report["cache"]["why"] == told[0]
    kept = of_epochs(report, "features_kept")
    assert kept[0] in (0, BATCH), (
        "at most the batch of the old code, if it was kept before the new one answered"
    )
    assert kept[1:] == [SAMPLES, 0] and of_epochs(report, "feature_hits") == [0, 0, SAMPLES]
    assert len(report["cache"]["keys"]) == 2

    old = Upgraded(service, at=-1)  # another job, of the old code alone
    found = train(old, tmp_path / "cache", epochs=2)
    assert of_epochs(found, "feature_hits") == [kept[0], SAMPLES], (
        "nothing of the new code is under the old key"
    )
    assert found["cache"]["why"] == ""


@pytest.mark.slow
def test_a_change_between_two_epochs_of_hits_is_no_change(service: Service, tmp_path: Path) -> None:
    train(Upgraded(service, at=-1), tmp_path / "cache")
    handler = Upgraded(service, at=0)
    report = train(handler, tmp_path / "cache")
    assert of_epochs(report, "feature_hits") == [SAMPLES] * 3
    assert handler.asked == 0 and report["cache"]["why"] == ""


@pytest.mark.slow
def test_a_server_that_tells_no_code_any_more(service: Service, tmp_path: Path) -> None:
    report = train(Upgraded(service, at=0, code=None), tmp_path / "cache")
    assert of_epochs(report, "features_kept") == [0, 0, 0]
    assert str(report["cache"]["why"]).endswith(OLDER)
