"""Features of the views of ``--augment-views``: each is kept in its own epoch, and found in every K-th one after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.harness import of_epochs
from support.kept_tools import check_same, train
from support.local_job import Silent, open_session, pack_pictures, service_of

from hapi.cache import catalog as cache_catalogue
from hapi.client.planning.cache_facts import KeptAt
from hapi.client.session import Session
from hapi.server.service import Service
from hapi.train.trainer import Trainer

SAMPLES = 48
JOB: dict[str, Any] = {
    "dataset": "pictures", "image_size": 32, "bs": 16, "request_size": 16, "split": 5, "augment": ("flip",),
    "augment_views": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("views") / "store"
    pack_pictures(store, count=SAMPLES)
    with service_of(store) as running:
        yield running


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)


@pytest.mark.slow
def test_the_same_losses_and_each_view_is_asked_for_once(service: Service, tmp_path: Path) -> None:
    reference = train(service, None, **JOB, epochs=5)
    found = train(service, tmp_path, **JOB, epochs=5)
    check_same(reference, found)
    assert of_epochs(found[0], "feature_hits") == [0, 0, SAMPLES, SAMPLES, SAMPLES]
    again = train(service, tmp_path, **JOB, epochs=5)
    check_same(reference, again)
    assert of_epochs(again[0], "feature_hits") == [SAMPLES] * 5


@pytest.mark.slow
def test_views_that_no_later_epoch_has_are_not_kept(service: Service, tmp_path: Path) -> None:
    report, _ = train(service, tmp_path, **JOB, epochs=2)
    assert of_epochs(report, "features_kept") == [0, 0] and "once" in report["cache"]["why"]
    planned, _ = train(service, tmp_path, **{**JOB, "split": "auto"}, epochs=2)
    assert planned["plan"]["reuse"]["mode"] == "recompute"
    assert "no more epochs than views" in planned["cache"]["why"]
    assert not list(tmp_path.glob("features@*"))


class Shares(Silent):
    """Notes after each epoch what is kept of all views, and of each."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.all: list[float] = []
        self.each: list[list[float]] = []

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        keeping, ids = self._session.keeping, self._session.job_context.training_ids
        at = KeptAt(keeping.cut)
        self.each.append([keeping.training.shares(epoch)[at].share(ids) for epoch in range(2)])
        self.all.append(keeping.training.shares()[at].share(ids))


@pytest.mark.slow
def test_a_plan_knows_what_each_epoch_finds(service: Service, tmp_path: Path) -> None:
    """After the first epoch half of all views is kept, and nothing of what the second one needs."""
    job = {
        **JOB, "split": "auto", "epochs": 5, "freeze": 12, "weights": "random:0", "cache": "auto",
        "cache_dir": str(tmp_path),
    }  # fmt: skip
    with open_session(service, **job) as session:
        shares = Shares(session)
        report = Trainer(session, callbacks=[shares]).run()
    assert shares.each == [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]] and shares.all == [0.5, 1, 1, 1, 1]
    reuse = report["plan"]["reuse"]
    assert (reuse["facts"]["views"], reuse["facts"]["samples"]) == (2, 2 * SAMPLES)
    assert of_epochs(report, "feature_hits") == [0, 0, SAMPLES, SAMPLES, SAMPLES]
    with open_session(service, **job) as session:  # a later job finds both views before it has opened them
        session.keeping.cut, ids = reuse["cut"], session.job_context.training_ids
        (kept,) = session.keeping.training.shares().values()
        assert kept.share(ids) == 1
