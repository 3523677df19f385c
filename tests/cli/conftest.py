"""What the tests of the commands need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.harness import packed_digits


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with 200 digits."""
    return packed_digits(tmp_path_factory.mktemp("store"), 200)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the tester's own environment reaches a command."""
    for name in [n for n in os.environ if n.startswith("HAPI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
