"""Frozen layers that draw random numbers in eval mode: each epoch has its own, with any cache and on any server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_job import open_session, pack_blobs

from hapi.errors import UsageError
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store

JOB: dict[str, Any] = {
    "model": "support.noisy_net:net", "freeze": "noise.dropout", "bs": 32, "request_size": 32, "epochs": 3,
    "weights": "random:0",
}  # fmt: skip
WHY = "layer 2 (noise.dropout) draws random numbers in eval mode too"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A server that shares what it has just computed, and keeps features."""
    pack_blobs(tmp_path / "store", count=64)
    settings = ServerSettings(
        store=str(tmp_path / "store"), cos_batch=16, threads=1, allow_model=("support.noisy_net",),
        cache_dir=str(tmp_path / "kept"),
    )  # fmt: skip
    service = Service(settings, open_store(str(tmp_path / "store")))
    try:
        yield service
    finally:
        service.close()


@pytest.mark.parametrize("split", ["freeze", 1])
def test_no_epoch_has_the_draws_of_another(service: Service, tmp_path: Path, split: Any) -> None:
    found = []
    with open_session(
        service, **JOB, split=split, cache="auto", cache_dir=str(tmp_path / "cache")
    ) as session:
        for epoch in (0, 1):
            order = np.argsort(np.concatenate(session.batch_ids(epoch)))
            found.append(torch.cat([features.clone() for features, _ in session.epoch(epoch)])[order])
            assert session.last.kept.hits == session.last.kept.kept == 0
        assert session.keeping.why.startswith(WHY)
    assert not torch.equal(found[0], found[1])
    assert not list(tmp_path.glob("cache/*@*"))
    # Those of the layer before are the same in each epoch.
    assert len(list(tmp_path.glob("kept/*@*"))) == (0 if split == "freeze" else 1)


def test_keeping_them_in_any_case_is_refused(service: Service, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        open_session(service, **JOB, cache="on", cache_dir=str(tmp_path / "cache"))
    assert WHY in str(found.value)
