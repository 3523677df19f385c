"""Listings of the stores behind obstore that end, whatever the store answers.

A broken store may announce a next page for ever. So a repeated page ends a listing with an error, as do more
objects or more time than Hapi ever needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import obstore
from obstore.store import AzureStore

from hapi.errors import StoreError

MOST_OBJECTS = 2_000_000
"""Most objects of a listing: twice the single images that are indexed in place; a dataset has thousands."""
MOST_SECONDS = 1800.0
"""Longest time between the first page of a listing and its last."""
PAGE = 1000
"""Objects of a page, as the stores have it."""

Page = Sequence[Any]
"""Metadata of some objects: ``path``, ``size``, ``e_tag``, ``last_modified``."""


class Listing:
    """One listing, perhaps in parts; the bounds hold for all of it together."""

    def __init__(self, store: Any, prefix: str, where: str) -> None:
        """Prepare a listing.

        Args:
            store: obstore's store.
            prefix: without a slash at its end.
            where: name of the listing in messages.
        """
        self._store, self._prefix, self._where = store, prefix, where
        self._firsts: set[str] = set()
        self._count, self._started = 0, time.monotonic()

    def pages(self, after: str | None = None) -> Iterator[Page]:
        """Yield all objects below the prefix and past the key ``after``, a page at a time, in the store's
        order.

        Raises :class:`StoreError` for a listing that does not end; other errors are obstore's.
        """
        for page in obstore.list(self._store, self._prefix or None, offset=after, chunk_size=PAGE):
            self._check(page)
            yield page

    def _check(self, page: Page) -> None:
        first = str(page[0]["path"]) if page else ""
        if first in self._firsts:
            raise StoreError(
                f"{self._where}: the store's listing goes in circles, {first[:200]!r} comes again; is it a store?"
            )
        self._firsts.add(first)
        self._count += len(page)
        if self._count > MOST_OBJECTS:
            raise StoreError(
                f"{self._where}: there are more than {MOST_OBJECTS} objects, or the store's listing has no end; "
                "give a folder that holds fewer"
            )
        if time.monotonic() - self._started > MOST_SECONDS:
            raise StoreError(
                f"{self._where}: the store's listing had {self._count} objects in {MOST_SECONDS:.0f} s and no end; "
                "give a folder that holds fewer"
            )

    def level(self) -> tuple[list[str], list[str]]:
        """Return the folders' names directly below the prefix and the keys of the objects there, sorted.

        The store's own delimiter is not used, since obstore would then collect all pages itself. When a whole
        page is in one folder, the rest of that folder is skipped, where the store can begin anywhere (Azure
        cannot). Errors are those of :meth:`pages`.
        """
        below = f"{self._prefix}/" if self._prefix else ""
        folders: set[str] = set()
        objects: set[str] = set()
        skipped: set[str] = set() if not isinstance(self._store, AzureStore) else {""}
        after: str | None = None
        while True:
            for page in self.pages(after):
                keys = [str(meta["path"]) for meta in page]
                names = {_folder(key, below) for key in keys}
                folders |= names
                objects |= {key for key in keys if not _folder(key, below)} if "" in names else set()
                name = names.pop()
                if not names and len(keys) == PAGE and not skipped & {"", name} and keys == sorted(keys):
                    skipped.add(name)
                    after = f"{below}{name}/~"  # past all that Hapi writes there
                    break
            else:
                return sorted(folders - {""}), sorted(objects)


def _folder(key: str, below: str) -> str:
    """The first part of a key below a prefix, when there is more behind it; else nothing."""
    name, slash, _ = key.removeprefix(below).partition("/")
    return name if slash else ""
