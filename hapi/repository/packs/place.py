"""Names of packs, in a store and on a server. Brings no torch."""

from __future__ import annotations

import re

from hapi.errors import BadRequestError
from hapi.wire.messages import PACKS_PATH

REPOSITORY = "repository"
PACKS = f"{REPOSITORY}/packs"
PACK_PATTERN = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".safetensors"


def pack_key(pack: str) -> str:
    """Return the key of the pack of this id."""
    return f"{PACKS}/{pack}{_SUFFIX}"


def check_pack(pack: str) -> str:
    """Return ``pack`` if it is the id of a pack; raise :class:`BadRequestError` otherwise."""
    if PACK_PATTERN.fullmatch(pack) is None:
        raise BadRequestError(f"{pack[:80]!r} is no pack's id (32 hex digits)")
    return pack


def pack_id(key: str) -> str:
    """Return the id of the pack of this key.

    Raises:
        BadRequestError: the key is no pack's.
    """
    name = key.removeprefix(f"{PACKS}/").removesuffix(_SUFFIX)
    if PACK_PATTERN.fullmatch(name) is None or key != pack_key(name):
        raise BadRequestError(f"{key[:80]!r} is no key of a pack")
    return name


def is_pack(key: str) -> bool:
    """Return whether the key is a pack's."""
    try:
        pack_id(key)
    except BadRequestError:
        return False
    return True


def pack_of(key: str) -> str | None:
    """Return the id of the pack of this key; None where there is no pack."""
    return pack_id(key) if is_pack(key) else None


def pack_path(key: str) -> str:
    """Return the path at which a server gives the pack of ``key``; :class:`BadRequestError` where there is no pack."""
    return f"{PACKS_PATH}/{pack_id(key)}"
