"""Folders whose listings are behind, as those of a store that has lost a node are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hapi.store.base import ObjectInfo
from hapi.store.local import LocalStore


@contextlib.contextmanager
def listing_behind(store: LocalStore) -> Iterator[None]:
    """During the block the folder's listing is as it is now; objects are read by key as ever."""
    known, list_now = store.list(), LocalStore.list

    def listed(asked: LocalStore, prefix: str = "") -> list[ObjectInfo]:
        if asked.root != store.root:
            return list_now(asked, prefix)
        return [info for info in known if not prefix or info.key.startswith(f"{prefix}/")]

    def below(asked: LocalStore, prefix: str) -> Iterator[tuple[str, str, str]]:
        return (info.key.removeprefix(f"{prefix}/").partition("/") for info in listed(asked, prefix))

    def keys(asked: LocalStore, prefix: str) -> list[str]:
        return sorted(f"{prefix}/{name}" for name, slash, _ in below(asked, prefix) if not slash)

    def names(asked: LocalStore, prefix: str) -> list[str]:
        return sorted({name for name, slash, _ in below(asked, prefix) if slash})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "list", listed)
        patch.setattr(LocalStore, "list_keys", keys)
        patch.setattr(LocalStore, "list_names", names)
        yield
