"""What all tests of the sample cache need."""

from __future__ import annotations

import pytest

from hapi.cache import catalog, records


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others wrote is looked for each time, and so is room after a full disk."""
    monkeypatch.setattr(catalog, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(records, "_FULL_SECONDS", 0.0)
