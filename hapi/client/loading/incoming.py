"""The batches of a pass in order, from this process's memory or from a prefetcher.

A small batch whose features lie in memory whole is copied by the thread that trains: to hand it over from another
thread would take longer. Rows in memory are never replaced, so that one look before the pass tells which batches these
are. When all of them are, no thread is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hapi.arrays import IntArray
from hapi.client.caching.sources import PassFeatures
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.prefetcher import Batch, Prefetcher

COPIED_BYTES = 4 << 20
"""Largest batch that the training thread copies itself; it takes about as long as a hand-over between threads."""


class Incoming:
    """Brings the batches of one pass; iterate it once, from one thread, and close it."""

    def __init__(
        self,
        job_of: Callable[[int], ExtractionJob],
        batches: Sequence[IntArray],
        features: PassFeatures | None,
        loading: Callable[[], PassLoading],
    ) -> None:
        """Begin to receive what is not at hand.

        Args:
            job_of: as in :class:`Prefetcher`, for a number in ``batches``.
            batches: sample ids of each batch.
            features: those that are kept; None for none.
            loading: returns the means of the pass, where something is to be loaded.
        """
        self._batches, self._features = batches, features
        self._at_hand = [False] * len(batches)
        if features is not None:
            largest = COPIED_BYTES // max(1, features.sample_bytes)
            self._at_hand = [
                lies and len(ids) <= largest
                for lies, ids in zip(features.in_memory(batches), batches, strict=True)
            ]
        others = [number for number, lies in enumerate(self._at_hand) if not lies]
        self._prefetcher = (
            Prefetcher(lambda number: job_of(others[number]), [batches[n] for n in others], loading())
            if others
            else None
        )

    @property
    def refused(self) -> int | None:
        """The split that a server said its device has no memory for."""
        return None if self._prefetcher is None else self._prefetcher.refused

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order; each is the consumer's until it asks for the next."""
        features = self._features
        coming = iter(()) if self._prefetcher is None else iter(self._prefetcher)
        for number, ids in enumerate(self._batches):
            if features is not None and self._at_hand[number]:
                yield Batch(number, ids, None, features.take(number, ids))
            else:
                yield replace(next(coming), number=number)
        next(coming, None)  # the last answers' reports come after their samples

    def close(self) -> None:
        """Stop receiving; returns once no thread writes into a batch any more."""
        if self._prefetcher is not None:
            self._prefetcher.close()
