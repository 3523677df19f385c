"""Headers of a remote store's packs that this machine has read: a pack's id is the digest of its header."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hapi.models.graph.digest import content_digest
from hapi.repository.known.record_log import RecordLog
from hapi.repository.packs.place import pack_id
from hapi.store.base import ObjectStore

Heads = dict[str, bytes]
"""Length field and header of packs, and maybe bytes behind them, by key."""


def known_heads(
    store: ObjectStore, sizes: Mapping[str, int], read: Callable[[ObjectStore, Mapping[str, int]], Heads]
) -> Heads:
    """Return the beginnings of packs, those that are not known by ``read``.

    Args:
        store: of the packs.
        sizes: bytes of each pack by key, as the store lists them now: of what is gone nothing is returned.
        read: reads the beginnings of packs in the store.
    """
    log = RecordLog.of(store, "packs")
    if log is None:
        return read(store, sizes)
    records = log.read()
    known = {key: records[pack_id(key)] for key in sizes if pack_id(key) in records}
    missing = {key: size for key, size in sizes.items() if key not in known}
    found = read(store, missing) if missing else {}
    log.append({pack_id(key): header for key, header in _sound(found).items()})
    return known | found


def keep_heads(store: ObjectStore, headers: Mapping[str, bytes]) -> None:
    """Keep the headers of packs, by id, that this machine has just written."""
    log = RecordLog.of(store, "packs")
    if log is not None:
        log.append(headers)


def _sound(heads: Heads) -> Heads:
    """The headers that are what the packs' names say."""
    whole = {key: head[: 8 + int.from_bytes(head[:8], "little")] for key, head in heads.items()}
    return {key: header for key, header in whole.items() if content_digest(header) == pack_id(key)}
