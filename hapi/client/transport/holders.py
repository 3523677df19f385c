"""Servers that keep features: each block of samples has one, by rendezvous hashing, so that a fleet keeps one copy.

Servers of a fleet have a cache each. Were a sample asked of another server in each epoch and by each job, all of them
would compute it. So a batch's rows go to the servers of their blocks, in a request of its own to each. Blocks are of
neighbours in the dataset: chunks of the store are read by few servers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hapi.arrays import IntArray
from hapi.wire.references import DatasetReference
from hapi.wire.rendezvous import ranking

BLOCKS = 2048
"""Blocks of a dataset, at least: shares of servers are even within some hundredths then."""
FEWEST_ROWS = 16
"""Rows of a request, at least: a server keeps nothing of smaller ones, whose last bits may differ."""


class HeldRows(NamedTuple):
    """Rows that one server keeps, or computes."""

    rows: IntArray
    """Ascending."""
    content: str
    """Content whose :func:`ranking` begins with that server; empty: any may have them."""


class Holders:
    """Finds the servers of samples. Not thread-safe."""

    def __init__(self, servers: Callable[[], Sequence[str]], count: int, group: int) -> None:
        """Divide the samples of a dataset.

        Args:
            servers: returns the servers' names, which may change.
            count: samples of the dataset.
            group: neighbours that its store is best read in.
        """
        self._servers = servers
        self._block = max(1, min(group, count // BLOCKS))
        self._known: tuple[str, ...] = ()
        self._holders: dict[str, int] = {}
        """By content: the number of its server."""

    def divided(self, dataset: DatasetReference, ids: IntArray, limit: int) -> list[HeldRows]:
        """Return the requests for samples ``ids`` of a batch, in the order of their first rows.

        A server that would get less than :data:`FEWEST_ROWS` leaves its rows to another one.

        Args:
            dataset: that they belong to.
            ids: int64 [n].
            limit: samples of a request, at most.
        """
        if (names := tuple(self._servers())) != self._known:
            self._known, self._holders = names, {}
        blocks, places = np.unique(ids // self._block, return_inverse=True)
        contents = [f"{dataset.name}@{dataset.version}#{block}" for block in blocks]
        holders = np.array([self._holder(content) for content in contents])[places]
        found = [
            HeldRows(rows, contents[places[rows[0]]])
            for number in range(len(names))
            if len(rows := np.flatnonzero(holders == number))
        ]
        pieces = [
            HeldRows(piece, held.content)
            for held in _merged(found, min(limit, FEWEST_ROWS))
            for piece in np.array_split(held.rows, -(-len(held.rows) // limit))
        ]
        return sorted(pieces, key=lambda piece: int(piece.rows[0]))

    def _holder(self, content: str) -> int:
        if content not in self._holders:
            self._holders[content] = self._known.index(ranking(self._known, content)[0])
        return self._holders[content]


def _merged(found: Sequence[HeldRows], fewest: int) -> list[HeldRows]:
    """Give the rows of servers that have few of them to those with the next more."""
    by_size = sorted(found, key=lambda held: len(held.rows))
    while len(by_size) > 1 and len(by_size[0].rows) < fewest:
        few, more = by_size.pop(0), by_size.pop(0)
        both = HeldRows(np.sort(np.concatenate([few.rows, more.rows])), more.content)
        by_size = sorted([*by_size, both], key=lambda held: len(held.rows))
    return by_size
