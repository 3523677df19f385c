"""A node of a real OpenStack Swift that was away has old copies of documents: nobody reads them."""

from __future__ import annotations

import pytest
from support.swift_tools import Swift

from hapi.store.open import open_store

pytestmark = pytest.mark.slow
NODE = ("account-1", "container-1", "object-1")
TIMES = 40
"""Reads, each from any of three nodes: the old copy would be among them but once in ten million times."""


@pytest.mark.timeout(600)
def test_no_old_copy_of_a_document_is_read(swift_copies: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in swift_copies.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://hapi/stale")
    store.put("document", b"old")
    store.put("removed", b"old")
    mark = store.mark("document")
    swift_copies.kill(*NODE)
    try:
        store.put("document", b"newer")
        store.delete("removed")
    finally:
        swift_copies.start()
    fresh = open_store("s3://hapi/stale")
    assert {fresh.get("document") for _ in range(TIMES)} == {b"newer"}
    assert {fresh.size("document") for _ in range(TIMES)} == {5} and fresh.mark("document") != mark
    assert not any(fresh.exists("removed") for _ in range(TIMES))
