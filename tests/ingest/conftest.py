"""The stores that tests of packing and indexing write into."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from hapi.store.base import ObjectStore
from hapi.store.open import open_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty one in a folder, and one in memory."""
    return open_store(
        str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    )
