"""The stores that tests of packing and indexing write into, and their clock."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from support.values import BEGINNING

from hapi.data import replaced
from hapi.store.base import ObjectStore
from hapi.store.open import open_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty one in a folder, and one in memory."""
    return open_store(
        str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time, in seconds from :data:`BEGINNING` on."""

    def moved(seconds: float) -> None:
        monkeypatch.setattr(replaced.time, "time", lambda: BEGINNING + seconds)

    moved(0)
    return moved
