"""References by the first digits of a digest, also where all of them are decimal, as of a version's number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hapi.errors import NotFoundError
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.push import SourceLayer, push_tensors
from hapi.store.local import LocalStore


def pieces() -> Iterator[memoryview]:
    yield memoryview(b"weights!")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a model of a digest that begins with decimal digits."""
    store = LocalStore(tmp_path)
    layer = SourceLayer("l", (SourceTensor("l.weight", "uint8", (8,), pieces),))
    manifest = push_tensors(store, "net", [layer]).model.manifest
    found = replace(manifest, digests=(*manifest.digests[:-1], "123456789012" + manifest.digest[12:]))
    store.put(found.key, found.to_bytes())
    return store


@pytest.mark.parametrize("digits", ["12345678", "123456789", "123456789012"])
def test_decimal_digits_of_a_digest(store: LocalStore, digits: str) -> None:
    assert open_model(store, f"net@{digits}").reference == "net@1"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("1234567", "has no version 1234567 in .*; it has 1"),
        ("87654321", "has no tag or digest '87654321'"),
        ("00000002", "has no tag or digest '00000002'"),
    ],
)
def test_digits_of_nothing(store: LocalStore, wanted: str, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        open_model(store, f"net@{wanted}")


def test_a_version_goes_before_a_digest(store: LocalStore) -> None:
    assert open_model(store, "net@00000001").reference == "net@1"
