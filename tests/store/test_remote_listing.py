"""Listings of remote stores: all folders found with few requests, and an end whatever the store says."""

from __future__ import annotations

from typing import Any

import pytest
from obstore.store import MemoryStore

from hapi.errors import DataError, StoreError
from hapi.store import remote_listing
from hapi.store.base import DOCUMENT_BYTES
from hapi.store.open import open_store
from hapi.store.remote_listing import PAGE, Listing


class Counted:
    """``obstore.list`` of a store that has these keys; counts the pages that are asked for."""

    def __init__(self, keys: list[str]) -> None:
        self.keys, self.pages = sorted(keys), 0

    def __call__(self, store: Any, prefix: str | None, *, offset: str | None, chunk_size: int) -> Any:
        found = [k for k in self.keys if k.startswith(f"{prefix}/") and (offset is None or k > offset)]
        for first in range(0, len(found), chunk_size):
            self.pages += 1
            yield [{"path": key} for key in found[first : first + chunk_size]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    keys = [f"datasets/{name}/p/shard-{n:05d}" for name in ("a", "b", "b0", "d") for n in range(5 * PAGE)]
    keys += ["datasets/c/manifest.json", "datasets/loose", "datasets/d/\u00fcber", "models/m/x"]
    found = Counted(keys)
    monkeypatch.setattr(remote_listing.obstore, "list", found)
    return found


def test_large_folders_are_skipped(counted: Counted) -> None:
    assert Listing(MemoryStore(), "datasets", "here").level() == (
        ["a", "b", "b0", "c", "d"],
        ["datasets/loose"],
    )
    assert counted.pages < 12, "of the 20 that there are"


def test_a_folder_that_cannot_be_skipped_is_gone_through(counted: Counted) -> None:
    counted.keys += [f"datasets/d/\u00fcber{n:05d}" for n in range(3 * PAGE)]
    counted.keys.sort()
    assert Listing(MemoryStore(), "datasets", "here").level()[0] == ["a", "b", "b0", "c", "d"]


def test_more_than_any_listing_needs(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_listing, "MOST_OBJECTS", 3 * PAGE)
    with pytest.raises(StoreError, match="more than 3000 objects, or the store's listing has no end"):
        list(Listing(MemoryStore(), "datasets", "here").pages())
    monkeypatch.setattr(remote_listing, "MOST_OBJECTS", 10**9)
    monkeypatch.setattr(remote_listing, "MOST_SECONDS", -1.0)
    with pytest.raises(StoreError, match="and no end"):
        list(Listing(MemoryStore(), "datasets", "here").pages())


def test_a_page_that_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_listing.obstore, "list", lambda *a, **k: iter([[{"path": "x"}]] * 3))
    with pytest.raises(StoreError, match="here: the store's listing goes in circles, 'x' comes again"):
        Listing(MemoryStore(), "", "here").level()


def test_names_that_others_put_there() -> None:
    """Folders by the same names from a store as from a listing with a delimiter."""
    store = open_store("memory://names-of-others")
    for key in ("a/b/c", "a/d", "e/f", "g", "a/b/d/e"):
        store.put(key, b"1")
    assert (store.list_names(""), store.list_names("a"), store.list_names("none")) == (["a", "e"], ["b"], [])


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_documents_are_bounded(kind: str, tmp_path: Any) -> None:
    store = open_store("memory://documents" if kind == "memory" else str(tmp_path))
    store.put("a/b", bytes(100))
    assert store.get("a/b", 100) == bytes(100)
    with pytest.raises(DataError, match="a/b: has more than the 99 bytes allowed for such an object"):
        store.get("a/b", 99)
    assert DOCUMENT_BYTES < 1 << 30
