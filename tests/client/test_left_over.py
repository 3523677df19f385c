"""Samples that ``--drop-last`` leaves out of an epoch: computed in one pass for the epochs that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import of_epochs
from support.kept_tools import JOB, LAST, SAMPLES, Counting, check_same, kept_service, train
from support.local_job import Interrupting, open_session

from hapi.cache import catalog as cache_catalogue
from hapi.cache.features import FeatureCache
from hapi.server.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with kept_service(tmp_path_factory.mktemp("left") / "store") as running:
        yield running


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)


@pytest.mark.slow_except("16 are left", "stored samples")
@pytest.mark.parametrize(
    ("bs", "changes", "last"),
    [
        pytest.param(32, {"split": 5, "validation": 1 / 3}, [], id="none is left"),
        pytest.param(40, {"split": 5}, [16], id="16 are left"),
        pytest.param(46, {"split": LAST}, [16], id="4 are left, and 12 go with them"),
        pytest.param(36, {"split": 0}, [32], id="stored samples"),
        pytest.param(36, {"split": 5, "request_size": 16}, [16, 16], id="two requests"),
        pytest.param(46, {"split": "auto", "cache": "on"}, [16], id="auto"),
        pytest.param(46, {"split": 5, "recheck": 2}, [16], id="recheck", marks=pytest.mark.slow),
    ],
)
def test_one_pass_computes_them_all(
    service: Service, tmp_path: Path, bs: int, changes: dict[str, Any], last: list[int]
) -> None:
    changes = {"bs": bs, "request_size": 64, **changes, "drop_last": True}
    reference = train(service, None, **changes)
    counting = Counting(service)
    found = train(counting, tmp_path, **changes)
    check_same(reference, found)
    report, trained = found[0], of_epochs(found[0], "samples")[0]
    left = (64 if "validation" in changes else SAMPLES) - trained
    assert trained == (SAMPLES if left else 64) - left
    assert of_epochs(report, "features_kept") == [trained + left, 0, 0]
    assert of_epochs(report, "feature_misses") == [trained, 0, 0]
    assert of_epochs(report, "requests")[1:] == [0, 0] == of_epochs(report, "bytes_received")[1:]
    assert (report["cache"]["fill"]["samples"], report["cache"]["why"]) == (trained + left, "")
    if "recheck" not in changes and "validation" not in changes:
        assert counting.requests[-len(last) :] == last


@pytest.mark.parametrize(
    "changes", [{"epochs": 1, "cache": "on"}, {"drop_last": False}, {"trainers": 2, "bs": 23}], ids=str
)
def test_where_no_epoch_needs_them_nobody_asks(
    service: Service, tmp_path: Path, changes: dict[str, Any]
) -> None:
    counting = Counting(service)
    settings = {"bs": 46, "request_size": 64, "split": 5, "epochs": 2, "drop_last": True, **changes}
    report, _ = train(counting, tmp_path, **settings)
    trained = of_epochs(report, "samples")[0]
    assert of_epochs(report, "features_kept")[0] == trained
    assert len(report["epochs"]) > 1 or counting.asked == trained


def test_only_before_an_epoch_that_has_the_same_samples(service: Service, tmp_path: Path) -> None:
    settings = {**JOB, "bs": 40, "split": 5, "drop_last": True, "cache_dir": str(tmp_path)}
    with open_session(service, **settings) as session:
        source = session.keeping.source(session.last.kept, 0, session.split, validation=False)
        assert source is not None
        for views, expected in ((None, [16, 16, 0]), (2, [16, 0, 0])):
            session.job_context.views = views
            left = [
                session.keeping.left_over(source, epoch, session.batch_ids(epoch), None) for epoch in range(3)
            ]
            assert [len(ids) for ids in left] == expected


def test_without_room_they_are_not_asked_for(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"bs": 40, "request_size": 64, "split": 5, "epochs": 2, "drop_last": True}
    reference = train(service, None, **changes)
    monkeypatch.setattr(FeatureCache, "put", lambda *_: None)
    monkeypatch.setattr(FeatureCache, "admits", False)
    counting = Counting(service)
    check_same(reference, train(counting, tmp_path, **changes))
    assert counting.requests == [40] * 4


@pytest.mark.slow
def test_a_resumed_epoch_keeps_them(service: Service, tmp_path: Path) -> None:
    changes = {"bs": 46, "request_size": 64, "split": 5, "drop_last": True}
    reference = train(service, None, **changes)
    kept = {**changes, "checkpoint": str(tmp_path / "run.pt")}
    with pytest.raises(KeyboardInterrupt):
        train(service, tmp_path / "cache", Interrupting(1), **kept)
    counting = Counting(service)
    found = train(counting, tmp_path / "cache", resume=True, **kept)
    check_same(reference, found)
    assert counting.requests == [46, 16]
