"""One request's use of shared features: what it takes, what it computes for others too, and what it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hapi.arrays import Bytes, Flags, IntArray, LabelArray
from hapi.errors import BadRequestError
from hapi.server.sharing.claims import PendingBatch
from hapi.server.sharing.counts import SourceCounts
from hapi.server.sharing.table import SharingTable, Taken
from hapi.waiting import Interest
from hapi.wire.labels import SINGLE, LabelForm

if TYPE_CHECKING:
    from hapi.cache.features import FeatureCache

SOUND_SAMPLES = 16
"""Samples of a forward pass from which on features have the same bits whatever the pass's size (decision 0009). Those
of smaller passes are not kept, and are shared only with requests for just these samples in the same order."""


class RequestShare:
    """Features of one key, for one request. Thread-safe; close it before the layers are let go."""

    def __init__(
        self,
        table: SharingTable,
        digest: str | None,
        interest: Interest,
        counts: SourceCounts,
        *,
        form: LabelForm = SINGLE,
        cache: FeatureCache | None = None,
        keep: Callable[[IntArray, Bytes, LabelArray], None] | None = None,
        fewest: int = SOUND_SAMPLES,
    ) -> None:
        """Use ``table`` and ``cache``.

        Args:
            table: samples under way and recent ones.
            digest: identity of the features; None: this request shares nothing.
            interest: of the request.
            counts: counts of the request's samples by source.
            form: of the labels.
            cache: the disk's features of that key, if any are kept.
            keep: keeps ids, features and labels on the disk, if they are to be kept.
            fewest: samples of a forward pass whose features may be shared.
        """
        self.shares = digest is not None
        self._table = table if self.shares else SharingTable(0)
        self._key = digest or ""
        self._interest = interest
        self.counts = counts
        self._form = form
        self._cache = cache if self.shares else None
        self._keep = keep if self.shares else None
        self._fewest = fewest
        self._lock = threading.Lock()
        self._claims: set[PendingBatch] = set()
        self._closed = False

    def holds_all(self, ids: IntArray) -> bool:
        """Return whether all samples ``ids`` can be read now, as far as is known."""
        return self.shares and bool((self._table.recent(self._key, ids) | self._on_disk(ids)).all())

    def missing(self, ids: IntArray) -> int:
        """Number of samples ``ids`` that nobody has or computes."""
        return int((self._table.unclaimed(self._key, ids) & ~self._on_disk(ids)).sum())

    def read(self, ids: IntArray, out: Bytes) -> Flags:
        """Copy features that are there into their rows of ``out``, uint8 [n, bytes of a sample].

        Returns:
            bool [n]: True for the rows that were copied.
        """
        found = self._table.read(self._key, ids, out)
        self.counts.add("recent", int(found.sum()))
        others = np.flatnonzero(~found)
        if self._cache is not None and len(others) and self._cache.held(ids[others]).any():
            features = np.empty((len(others), out.shape[1]), dtype=np.uint8)
            labels = self._form.empty(len(others))
            read = self._cache.read(ids[others], features, labels)
            out[others[read]] = features[read]
            found[others[read]] = True
            self.counts.add("cache", int(read.sum()))
        return found

    def take(self, ids: IntArray, max_samples: int, *, join: bool = True) -> Taken:
        """Divide samples ``ids``, each once, as :meth:`SharingTable.take` does; the claims are this request's.

        Raises:
            BadRequestError: the share was closed, since the client is gone.
        """
        with self._lock:
            if self._closed:
                raise BadRequestError("the client went away")
            table = self._table if max_samples >= self._fewest else SharingTable(0)
            taken = table.take(self._key, ids, self._interest, max_samples, join=join)
            self._claims.update(pending for pending, _ in taken.claims)
        return taken

    def dividing(self) -> threading.Lock:
        """Return the lock to hold around :meth:`take` and the :meth:`claim_others` that belong to it."""
        return self._table.dividing(self._key)

    def publish(self, pending: PendingBatch, features: Bytes, labels: LabelArray, fitted: int) -> None:
        """Share the features of an own claim.

        Args:
            pending: from :meth:`take`.
            features: uint8 [n, bytes of a sample], which are copied.
            labels: n of them.
            fitted: samples of the forward pass that computed them.
        """
        sound = fitted >= self._fewest
        if sound and (self._keep is not None or self._table.max_bytes):
            features = features.copy()
        if sound and self._keep is not None:
            self._keep(pending.ids, features, labels)
        self._table.publish(self._key, pending, features if sound else None)
        with self._lock:
            self._claims.discard(pending)

    def claim_others(
        self, count: int, wanted: int, admitted: Callable[[IntArray], Flags]
    ) -> PendingBatch | None:
        """Claim samples that nobody has or computes, for a forward pass that has room for them.

        Args:
            count: samples of the dataset.
            wanted: most samples to claim.
            admitted: tells which of some samples may be claimed.

        Returns:
            The claim; None when there are none.
        """
        found = np.empty(0, dtype=np.int64)
        for others in self._table.others(self._key, count):
            others = others[~self._on_disk(others)]
            found = np.concatenate([found, others[admitted(others)][: wanted - len(found)]])
            if len(found) == wanted:
                break
        with self._lock:
            if self._closed:
                return None
            pending = self._table.take_others(self._key, found, self._interest)
            if pending is not None:
                self._claims.add(pending)
        return pending

    def fail(self, pending: PendingBatch) -> None:
        """Give up an own claim: those that wait for it compute for themselves."""
        begun = pending.fail()
        self._table.publish(self._key, pending, None)
        if begun is not None:
            begun.leave()
        with self._lock:
            self._claims.discard(pending)

    def close(self) -> None:
        """Give up all claims that are not done. Their passes are over afterwards."""
        with self._lock:
            self._closed = True
            claims = list(self._claims)
        for pending in claims:  # all at once: others need not wait for the passes
            pending.fail()
        for pending in claims:
            self.fail(pending)

    def _on_disk(self, ids: IntArray) -> Flags:
        if self._cache is None:
            return np.zeros(len(ids), dtype=np.bool_)
        return self._cache.held(ids)
