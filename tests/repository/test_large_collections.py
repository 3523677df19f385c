"""Collections in stores with many versions: descriptions are read side by side, and few are held at a time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stores import CountingRemote
from support.waiting import PATIENCE

from hapi.repository.entries import SourceTensor
from hapi.repository.packs import collect
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.journal import append
from hapi.repository.packs.place import PACKS
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.store.base import DOCUMENT_BYTES


def pieces() -> Iterator[memoryview]:
    yield memoryview(bytes(100_000))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Together:
    """A store whose only pack 300 versions of 30 names use, as their pushes leave them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    store = Together(tmp_path / "store")
    layer = SourceLayer("l", (SourceTensor("l.weight", "uint8", (100_000,), pieces),))
    manifest = push_tensors(store, "net0", [layer]).model.manifest
    for number in range(1, 300):
        found = replace(manifest, name=f"net{number % 30}", version=1 + number // 30)
        store.put(found.key, found.to_bytes())
    return store


class Together(CountingRemote):
    """A store that answers for a version's description once several are asked for."""

    barrier: threading.Barrier | None = None

    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        if self.barrier is not None and "/versions/" in key:
            self.barrier.wait()
        return super().get(key, max_bytes)


def test_descriptions_are_read_side_by_side(store: Together) -> None:
    store.barrier = threading.Barrier(4, timeout=PATIENCE)
    assert collect_packs(store) == ()
    store.barrier = None
    assert not verify_model(store, "net7@10").damages


@pytest.mark.slow
def test_few_descriptions_are_held_at_a_time(store: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    class Document(dict[str, Any]):
        """A description of which is known how many there are."""

    alive, most, read, lock = weakref.WeakSet[Document](), 0, 0, threading.Lock()
    Document.__hash__ = object.__hash__  # type: ignore[assignment]

    def noted(*arguments: Any) -> Mapping[str, Any]:
        nonlocal most, read
        found = Document(read_document(*arguments))
        with lock:
            alive.add(found)
            read, most = read + 1, max(most, len(alive))
        return found

    read_document = collect.read_document
    monkeypatch.setattr(collect, "read_document", noted)
    gc.collect()
    assert collect_packs(store) == ()
    assert read >= 600 and most <= 3 * collect._TOGETHER, (read, most)


@pytest.mark.slow
def test_all_that_is_needed_by_any_of_them_stays(store: Together) -> None:
    append(store, {"push": "0" * 24, "packs": [], "structures": []})
    for number in range(1, 29):
        for version in range(1, 11):
            store.delete(f"models/net{number}/versions/{version:08}.json.gz")
    assert collect_packs(store) == () and len(store.list(PACKS)) == 1
    for name in ("net0", "net29"):
        for version in range(1, 11):
            assert len(store.list(PACKS)) == 1
            store.delete(f"models/{name}/versions/{version:08}.json.gz")
            gone = collect_packs(store)
    assert len(gone) == 2 and not store.list(PACKS)
