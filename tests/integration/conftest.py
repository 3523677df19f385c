"""A Swift with one node and one with three nodes and three copies of everything, each started when first asked for;
the digits in one, and what training on them gives. One test process has the files that use them (``support.by_file``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import hapi, server
from support.swift_tools import ONE, PACKED, SERVER, SPLIT, Swift, running_swift, trained


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """One node, one copy."""
    with running_swift(tmp_path_factory.mktemp("swift"), 1, 1) as running:
        yield running


@pytest.fixture(scope="session")
def swift_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """Three nodes, three copies."""
    with running_swift(tmp_path_factory.mktemp("swift-copies"), 3, 3) as running:
        yield running


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run at ``SPLIT``, from a folder on this machine."""
    folder = tmp_path_factory.mktemp("local")
    hapi("pack", "sklearn:digits", f"{folder}/digits", *PACKED)
    with server(folder, *SERVER) as running:
        return trained(running, SPLIT, folder / "report.json")


@pytest.fixture(scope="session")
def packed(swift: Swift) -> Swift:
    """The one-node Swift with the digits in it."""
    hapi("pack", "sklearn:digits", f"{ONE}/digits", *PACKED, **swift.environment)
    return swift
