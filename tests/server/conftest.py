"""The store that the tests of requests share: none of them writes into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http_tools import Known, ServedApplication, make_store, served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with digits and a pushed model."""
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def known(folder: Path) -> Known:
    """Good requests against it, and their answers."""
    return Known(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedApplication]:
    """A server over it, for the tests of one file."""
    with served(folder) as application:
        yield application
