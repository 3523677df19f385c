"""Headers of a remote store's packs that this machine has read, or that the store has together: a pack's id is the
digest of its header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hapi.models.graph.digest import content_digest
from hapi.repository.known.record_log import RecordLog
from hapi.repository.known.shared_heads import MIN_ADDED, SharedHeads
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
    if store.local_path("packs") is not None:
        return read(store, sizes)
    log, keys = RecordLog.of(store, "packs"), {pack_id(key): key for key in sizes}
    records = {} if log is None else log.read()
    known = {pack: records[pack] for pack in keys if pack in records}
    shared = SharedHeads(store, keys.keys())
    reads = len(keys) - len(known) >= MIN_ADDED or shared.is_behind
    together = shared.read() if reads else {}
    missing = {key: sizes[key] for pack, key in keys.items() if pack not in known and pack not in together}
    found = read(store, missing) if missing else {}
    new = {pack_id(key): header for key, header in _sound(found).items()}
    if reads:
        shared.add(known | new)
    if log is not None:
        log.append({**{pack: header for pack, header in together.items() if pack not in known}, **new})
    return {keys[pack]: header for pack, header in (together | known).items()} | found


def keep_heads(store: ObjectStore, headers: Mapping[str, bytes]) -> None:
    """Keep the headers of packs, by id, that this machine has just written."""
    log = RecordLog.of(store, "packs")
    if log is not None:
        log.append(headers)


def _sound(heads: Heads) -> Heads:
    """The headers that are what the packs' names say."""
    whole = {key: head[: 8 + int.from_bytes(head[:8], "little")] for key, head in heads.items()}
    return {key: header for key, header in whole.items() if content_digest(header) == pack_id(key)}
