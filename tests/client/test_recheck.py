"""--recheck: servers that lie are found out and left, honest ones never; nothing false is used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import lying
from support.local_job import (
    COUNT,
    SMALL_MODEL,
    Silent,
    built,
    pack_blobs,
    service_of,
    settings_of,
    trainer_of,
)

from hapi.client.recheck import TOLERANCE
from hapi.client.session import Session
from hapi.errors import DataError, TransportError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.transport.http import Handler, LoopbackTransport

SAMPLES, EXTRACT = "/v1/samples", "/v1/extract"


def session_over(*handlers: Handler, **changes: Any) -> Session:
    """Over these servers, named a, b, c."""
    settings = settings_of(**{"recheck": COUNT, "patience": 1.0, **changes})
    transports = [LoopbackTransport(h, name) for h, name in zip(handlers, "abc", strict=False)]
    with mock.patch("hapi.client.models.build_network", built):
        return Session.open(settings, transports=transports)


def epoch_of(session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(session.epoch(0))


@pytest.mark.slow_cases("auto")
@pytest.mark.parametrize("split", [0, 5, "freeze", "auto"])
def test_an_honest_server_stands_it(remembered: Handler, split: int | str) -> None:
    with session_over(remembered, split=split) as session:
        epoch_of(session)
        assert session.recheck is not None
        assert session.recheck.compared == COUNT
        assert session.recheck.largest <= TOLERANCE / 10
        assert session.recheck.to_json()["left"] == []


@pytest.mark.slow
def test_a_random_transform_is_drawn_alike(tmp_path: Path) -> None:
    from PIL import Image

    from hapi.ingest.pack import pack
    from hapi.ingest.sources.open import open_source
    from hapi.store.open import open_store

    for n in range(12):
        (tmp_path / "images" / str(n % 2)).mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").rotate(30 * n).convert("RGB").save(
            tmp_path / "images" / str(n % 2) / f"{n}.png"
        )
    pack(open_source(str(tmp_path / "images")), open_store(str(tmp_path / "store")), "blobs")
    changes = {"augment": ("crop-flip",), "image_size": 32, "bs": 4}
    with (
        service_of(tmp_path / "store") as running,
        session_over(loopback_handler(running), recheck=12, **changes) as session,
    ):
        for epoch in (0, 1):
            list(session.epoch(epoch))
        assert session.recheck is not None and session.recheck.compared == 24


@pytest.mark.parametrize("lie", [lying.features, lying.labels])
def test_one_server_that_contradicts_its_own_samples(remembered: Handler, lie: lying.Lie) -> None:
    with session_over(lying.lying(remembered, lie)) as session:
        with pytest.raises(
            DataError, match=r"--recheck: a: its answers are false at split \d+: .*no other server is left"
        ):
            epoch_of(session)
        assert session.last.samples == 0, "nothing false was handed out"


@pytest.fixture(scope="module")
def right(remembered: Handler) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches as an honest server alone gives them."""
    with session_over(remembered, recheck=0) as session:
        return epoch_of(session)


@pytest.mark.slow_cases("0-features")
@pytest.mark.parametrize(("place", "lie"), [(0, lying.features), (1, lying.labels), (2, lying.features)])
def test_a_server_that_lies_is_left_and_the_features_are_the_others(
    remembered: Handler, right: list[Any], place: int, lie: lying.Lie, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = [remembered, remembered, remembered]
    handlers[place] = lying.lying(remembered, lie)
    with session_over(*handlers) as session, caplog.at_level(logging.WARNING):
        for (mine, my_labels), (features, labels) in zip(epoch_of(session), right, strict=True):
            torch.testing.assert_close(mine, features, rtol=1e-5, atol=1e-5)
            assert torch.equal(my_labels, labels)
        assert session.recheck is not None
        assert session.recheck.left == ["abc"[place]]
        assert session.recheck.compared >= COUNT
    told = [r.getMessage() for r in caplog.records if "false" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"{'abc'[place]}: its answers are false at split")


@pytest.mark.slow
def test_stored_samples_that_differ_need_a_third(remembered: Handler) -> None:
    false = lying.lying(remembered, lying.stored, (SAMPLES,))
    with (
        session_over(false, remembered, split=0) as session,
        pytest.raises(DataError, match=r"[ab] and [ab] have different"),
    ):
        epoch_of(session)
    with session_over(remembered, false, remembered, split=0) as session:
        epoch_of(session)
        assert session.recheck is not None and session.recheck.left == ["b"]
    with session_over(remembered, false, remembered) as session:  # it lies to whoever asks for a comparison
        epoch_of(session)
        assert session.recheck is not None and session.recheck.left in (["b"], [])


@pytest.mark.slow
def test_labels_that_differ_from_those_of_another(remembered: Handler) -> None:
    """The same lie in features' frames and in stored samples' ones, which one server alone gets away with."""
    false = lying.lying(remembered, lying.labels, (SAMPLES, EXTRACT))
    with session_over(false) as session:
        epoch_of(session)
    with session_over(false, remembered, remembered) as session:
        epoch_of(session)
        assert session.recheck is not None and session.recheck.left == ["a"]


def test_a_witness_that_is_away_is_no_reason_to_stop(remembered: Handler) -> None:
    def away(method: str, path: str, body: bytes) -> Any:
        if path == SAMPLES:
            raise TransportError("out of reach")
        return remembered(method, path, body)

    with session_over(remembered, away) as session:
        epoch_of(session)
        assert session.recheck is not None and session.recheck.compared == COUNT


def test_which_samples_is_not_known_before(remembered: Handler) -> None:
    """At least as many as asked for, others in each run."""
    drawn = []
    with session_over(remembered, recheck=5) as session:
        recheck = session.recheck
        assert recheck is not None
        planned = session.batch_ids(0)
        for _ in range(60):
            recheck.begin(planned)
            drawn.append(tuple((n, tuple(rows.tolist())) for n, rows in sorted(recheck._drawn.items())))
            assert all(rows < len(planned[n]) for n, its in drawn[-1] for rows in its)
    counts = [sum(len(its) for _, its in one) for one in drawn]
    assert min(counts) >= 5 and max(counts) > 7 and 7 < sum(counts) / 60 < 13
    assert len(set(drawn)) == 60


def test_the_report_says_what_was_compared(remembered: Handler) -> None:
    with session_over(remembered, recheck=3, epochs=1) as session:
        report = trainer_of(session, Silent()).run()
    assert report["recheck"]["samples"] >= 3 and report["recheck"]["left"] == []


@pytest.mark.slow
def test_a_pushed_models_front_is_fetched_for_it(tmp_path: Path) -> None:
    from hapi.models.zoo.build import ModelSpec, build
    from hapi.repository.push import push
    from hapi.store.open import open_store

    pack_blobs(tmp_path / "store")
    spec = ModelSpec(architecture=SMALL_MODEL, num_classes=4, weights="random:3", input_shape=(3, 32, 32))
    push(open_store(str(tmp_path / "store")), "mine", build(spec), spec)
    with service_of(tmp_path / "store") as running:
        service: Service = running
        with session_over(loopback_handler(service), model="store:mine") as session:
            epoch_of(session)
            assert session.recheck is not None and session.recheck.compared == COUNT
