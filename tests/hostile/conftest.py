"""Tests against real processes that are given what nobody should give them: floods, hung reads, full disks, damaged
files, lying peers. Each is ended by the test that started it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.http_tools import Known, make_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with digits and a pushed model."""
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def known(folder: Path) -> Known:
    """Good requests against it, and their answers."""
    return Known(folder)
