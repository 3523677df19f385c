"""Structures as plain JSON, as an earlier version wrote them: read, kept by collections, beside compressed ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hapi.ingest.removal import remove_model
from hapi.repository import opening
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import has_structure, open_model, read_structure
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.structure_key import STRUCTURES, plain_structure_key
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.store.local import LocalStore


def pieces() -> Iterator[memoryview]:
    yield memoryview(bytes(100))


def push(store: LocalStore, name: str) -> str:
    layers = [SourceLayer("l", (SourceTensor("l.weight", "uint8", (100,), pieces),))]
    return push_tensors(store, name, layers).model.manifest.structure.digest


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The structure of a model as it was stored before."""
    store = LocalStore(tmp_path)
    digest = push(store, "net")
    structure = read_structure(store, digest)
    store.delete(structure.key)
    assert not has_structure(store, digest)
    store.put(plain_structure_key(digest), structure.to_bytes())
    monkeypatch.setattr(opening, "_structures", type(opening._structures)())
    return digest


def test_it_is_read_and_kept(tmp_path: Path, digest: str) -> None:
    store = LocalStore(tmp_path)
    assert has_structure(store, digest)
    assert collect_packs(store) == () and open_model(store, "net").manifest.structure.digest == digest
    assert not verify_model(store, "net").damages
    assert push(store, "other") == digest
    assert len(store.list(STRUCTURES)) == 2 and collect_packs(store) == ()
    remove_model(store, "net")
    assert collect_packs(store) == ()
    remove_model(store, "other")
    assert len(collect_packs(store)) == 3 and not store.list(STRUCTURES)


def test_a_structure_of_many_layers_is_a_small_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [f"language_model.model.layers.{n}.self_attn.{x}_proj" for n in range(100) for x in "qkvo"]
    layers = [SourceLayer(n, (SourceTensor(f"{n}.weight", "uint8", (100,), pieces),)) for n in names]
    structure = push_tensors(store, "large", layers).model.manifest.structure
    assert store.size(structure.key) < len(structure.to_bytes()) / 2.5
