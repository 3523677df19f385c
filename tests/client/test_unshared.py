"""Loops by several processes of which each would train on all samples: the first one warns, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.local_job import open_session, pack_blobs, service_of

from hapi.server.service import Service

SAID = "3 processes train, and each gets all samples of every epoch"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("unshared") / "store"
    pack_blobs(store)
    with service_of(store) as running:
        yield running


@pytest.mark.slow_cases("0-3-1-True")
@pytest.mark.parametrize(
    ("rank", "size", "trainers", "warned"),
    [
        ("0", "3", 1, True),
        ("2", "3", 1, False),
        ("0", "3", 3, False),
        ("0", "1", 1, False),
        ("", "", 1, False),
        ("?", "many", 1, False),
    ],
)
def test_it_is_told_once(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: str,
    size: str,
    trainers: int,
    warned: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with open_session(service, trainers=trainers) as session:
        for epoch in range(2):
            next(iter(session.epoch(epoch)))
    assert len([message for message in caplog.messages if message.startswith(SAID)]) == warned
