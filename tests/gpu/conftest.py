"""Tests that need a GPU: skipped, with the reason, where there is none.

``HAPI_GPU_TESTS_ON=cpu`` runs on a CPU what a CPU can do, to try the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plain import packed_digits

from hapi.models.devices import set_arithmetic
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store

PLACE = os.environ.get("HAPI_GPU_TESTS_ON", "cuda")
_notes: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLACE == "cuda" and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device here (torch.cuda.is_available() is False)")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist hands its notes to the one that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["notes"] = _notes


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _notes.extend(getattr(node, "workeroutput", {}).get("notes", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _notes:
        terminalreporter.section("measured")
        for note in _notes:
            terminalreporter.write_line(note)


@pytest.fixture
def note() -> Callable[[str], None]:
    """Lines that are printed after the tests: how far from its bound a figure was."""
    return _notes.append


@pytest.fixture
def place() -> str:
    """Name of the device under test."""
    return PLACE


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, with exact float32; tests that use it cannot run on a CPU."""
    if PLACE != "cuda":
        pytest.skip("needs CUDA itself")
    device = torch.device("cuda", 0)
    set_arithmetic(device)
    return device


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"))


@pytest.fixture
def make_service(store: Path) -> Iterator[Callable[..., Service]]:
    """Services over the digits, closed at the end."""
    made: list[Service] = []

    def make(**settings: object) -> Service:
        chosen = ServerSettings(**{"store": str(store), "device": PLACE, **settings})  # type: ignore[arg-type]
        made.append(Service(chosen, open_store(str(store))))
        return made[-1]

    yield make
    for service in made:
        service.close()
