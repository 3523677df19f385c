"""Addresses of a pack: its object in a store, its path on a server."""

from __future__ import annotations

from hapi.wire.messages import PACKS_PATH
from hapi.wire.references import DIGEST_PATTERN

PACKS_PREFIX = "repository/packs"
PACK_SUFFIX = ".safetensors"


def pack_key(pack: str) -> str:
    """Return the key of the object that holds a pack."""
    return f"{PACKS_PREFIX}/{pack}{PACK_SUFFIX}"


def pack_of(key: str) -> str | None:
    """Return the id of the pack at ``key``; None where there is no pack."""
    name = key.removeprefix(f"{PACKS_PREFIX}/").removesuffix(PACK_SUFFIX)
    return name if key == pack_key(name) and DIGEST_PATTERN.fullmatch(name) else None


def pack_path(key: str) -> str:
    """Return the path at which a server gives the pack of ``key``; ValueError where there is no pack."""
    pack = pack_of(key)
    if pack is None:
        raise ValueError(f"{key!r} is no pack")
    return f"{PACKS_PATH}/{pack}"
