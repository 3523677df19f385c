"""The commit of a dataset or model: its manifest is written last, once all objects that it names are in
place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from hapi.errors import DataError, NotFoundError, StoreError
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import Lease

LOOKS, BETWEEN_LOOKS = 5, 0.2
"""Number of looks, and seconds between them: a replica of the store may be behind for a moment."""


def commit(
    store: ObjectStore, key: str, data: bytes, *, mark: str | None, lease: Lease, parts: Mapping[str, int]
) -> None:
    """Write the manifest ``key``, or nothing if anything is amiss.

    Where the store can compare and write in one step, a writer that was paused just before this step, for
    however long, cannot overwrite its successor's manifest.

    Args:
        store: where it is written.
        key: the manifest's object.
        data: its bytes.
        mark: :meth:`ObjectStore.mark` of the manifest from when the lock was taken.
        lease: the lock that guards the name.
        parts: size in bytes of each object that the manifest relies on, by key.

    Raises:
        DataError: a part does not exist, or has another size.
        LeaseLostError: another writer has taken the lock over.
        ConflictError: another process wrote the manifest meanwhile.
        StoreError: the store reports a written manifest, and does not have it.
    """
    lease.check()  # before the parts are missed: a successor may have removed them
    _look_for(store, parts)
    lease.check()  # after it, as it may take long
    store.put_over(key, data, mark)
    _look_again(store, key, data)


def _look_again(store: ObjectStore, key: str, data: bytes) -> None:
    """:class:`StoreError` unless the manifest is there as it was written."""
    for _ in range(LOOKS):
        with contextlib.suppress(NotFoundError):
            if store.get(key) == data:
                return
        time.sleep(BETWEEN_LOOKS)
    raise StoreError(
        f"{store.url}/{key}: the store says that it wrote it, but does not have it; run the same again, and if that "
        "does not help, look after the store"
    )


def _look_for(store: ObjectStore, parts: Mapping[str, int]) -> None:
    """:class:`DataError` unless all ``parts`` are there. One listing for each folder; what it lacks is asked for."""
    listed: dict[str, int] = {}
    for folder in {key.rpartition("/")[0] for key in parts} if len(parts) > 1 else ():
        listed |= {info.key: info.size for info in store.list(folder)}
    for key, size in parts.items():
        if listed.get(key) == size:
            continue
        try:  # a listing may be older than the object
            found = (
                f"has {stored_size} bytes instead of {size}"
                if (stored_size := store.size(key)) != size
                else None
            )
        except NotFoundError:
            found = "is gone"
        if found is not None:
            raise DataError(
                f"{store.url}/{key} {found}, although it was there: another process or person removed or changed it; "
                "run the same again"
            )
