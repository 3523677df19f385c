"""Names of structures in a store. Brings no torch."""

from __future__ import annotations

STRUCTURES = "repository/structures"


def structure_key(digest: str) -> str:
    """Return the key of the structure of this digest."""
    return f"{STRUCTURES}/{digest}.json"
