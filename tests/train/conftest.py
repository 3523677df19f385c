"""The network and the store of tests that read and write whole networks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_job import SMALL_MODEL, pack_blobs, service_of

from hapi.api.models import push
from hapi.server.service import Service


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the datasets ``blobs`` and ``three`` and the pushed model ``pushed``; tests push more."""
    store = tmp_path_factory.mktemp("small") / "store"
    pack_blobs(store, count=24, side=64)
    pack_blobs(store, "three", count=24, classes=3, side=64)
    push(SMALL_MODEL, f"{store}/pushed", weights="random:9", input_size=64)
    return store


@pytest.fixture(scope="session")
def small_service(small_store: Path) -> Iterator[Service]:
    """A service over :func:`small_store`, without a socket."""
    with service_of(small_store) as running:
        yield running
