"""Names of structures in a store. Brings no torch."""

from __future__ import annotations

STRUCTURES = "repository/structures"


def structure_key(digest: str) -> str:
    """Return the key of the structure of this digest."""
    return f"{STRUCTURES}/{digest}.json.gz"


def plain_structure_key(digest: str) -> str:
    """Return the key that an earlier version gave it, as plain JSON."""
    return f"{STRUCTURES}/{digest}.json"


def structure_of_key(key: str) -> str:
    """Return the digest of the structure of either key."""
    return key.rpartition("/")[2].partition(".")[0]
