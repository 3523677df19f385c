"""Rendezvous hashing: which servers of a list are responsible for a content, found by each side alone.

DStore maps the id of a model to its provider by a stable hash, so that clients need no directory and load is spread
(section 3, "Distributed key-value store providers"). Its modulo moves nearly all models when a server joins. Here each
server has a score for each content, and the servers are ranked by it (Thaler and Ravishankar, "A name-based mapping
scheme for rendezvous", 1996): a server that leaves hands over its own contents alone, one that joins takes an equal
share from each of the others, and the ranking is the order of fail-over.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def ranking(servers: Iterable[str], content: str) -> list[str]:
    """Return the servers, each once, from the one that is responsible for ``content`` to the last to ask.

    The order is the same in every process, and whatever the order of ``servers``.

    Args:
        servers: their names, such as URLs; all sides must write them alike (:func:`canonical_url` does).
        content: id of the content: a pack's id, a model's reference.
    """
    return sorted(set(servers), key=lambda server: (-_score(server, content), server))


def _score(server: str, content: str) -> int:
    """Well-mixed 64 bits of the pair. The length keeps pairs apart whose texts join alike."""
    data = f"{len(server)}:{server}{content}".encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(data)
