"""Tensors whose bytes a store lost, told from the sizes of its packs without reading one. Brings no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hapi.errors import NotFoundError
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.packs.place import PACKS, is_pack
from hapi.store.base import ObjectStore

REMEDY = "push the model again with --repair"
"""Advice that repairs damaged tensors."""


def pack_sizes(store: ObjectStore) -> dict[str, int]:
    """Return the bytes of each pack by key."""
    return {info.key: info.size for info in store.list(PACKS) if is_pack(info.key)}


def problem_of_packs(
    store: ObjectStore, needed: Iterable[tuple[str, int]], sizes: Mapping[str, int]
) -> str | None:
    """Return a line on tensors that are lost; None where none is.

    Args:
        store: asked for packs that ``sizes`` lacks, or has too short: a listing may be behind.
        needed: key of the pack of each tensor, and bytes that the pack has at least if the tensor is there.
        sizes: bytes of the packs that are there, by key.
    """
    tensors = list(needed)
    doubtful = dict.fromkeys(key for key, nbytes in tensors if sizes.get(key, -1) < nbytes)
    found = side_by_side(store, lambda key: held_bytes(store, key), doubtful)
    held = {**sizes, **dict(zip(doubtful, found, strict=True))}
    lost = [key for key, nbytes in tensors if held.get(key, -1) < nbytes]
    if not lost:
        return None
    packs = dict.fromkeys(lost)
    missing = sum(held[key] < 0 for key in packs)
    ways = [f"{missing} missing"] * (missing > 0) + [f"{len(packs) - missing} cut short"] * (
        len(packs) > missing
    )
    return f"{len(lost)} of {len(tensors)} tensors are lost (packs: {', '.join(ways)}); {REMEDY}"


def held_bytes(store: ObjectStore, key: str) -> int:
    """Return the bytes of an object; -1 where it is missing."""
    try:
        return store.size(key)
    except NotFoundError:
        return -1
