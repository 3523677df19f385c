"""Caches of the training samples' features that a run has, and the shares of the samples that they hold.

Each view of ``--augment-views`` has a key of its own, which every K-th epoch uses. Where the wire rounds, each split
has one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hapi.arrays import IntArray
from hapi.cache.disk_rates import DiskRates
from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.client.caching.keys import rounding_at
from hapi.client.job_context import JobContext
from hapi.client.planning.cache_facts import KeptAt, Shares
from hapi.codecs.names import NONE

MOST_VIEWS = 256
"""Views whose caches are asked for their shares; of more, what is kept of the others does not count."""


class TrainingFeatures:
    """Finds the caches. Not thread-safe."""

    def __init__(
        self,
        job_context: JobContext,
        key_of: Callable[[int], FeatureKey | None],
        is_begun: Callable[[FeatureKey], bool],
        cache_of: Callable[[FeatureKey], FeatureCache],
        split: Callable[[], int],
    ) -> None:
        """Find caches of ``job_context``.

        Args:
            job_context: the run.
            key_of: key of the samples in the view of an epoch that cross now; None where none may be kept.
            is_begun: tells whether there may be something of a key.
            cache_of: opens the cache of a key.
            split: tells where samples cross now.
        """
        self._job_context, self._key_of, self._split = job_context, key_of, split
        self._is_begun, self._cache_of = is_begun, cache_of

    def of(self, epoch: int = 0) -> Mapping[KeptAt, FeatureCache]:
        """Return the caches by cut in the view of ``epoch``; none where features may not be kept.

        Where the wire rounds, also by the split that they came by: the present one, and those that there are some of.
        """
        key = self._key_of(epoch)
        return {} if key is None else self._of(key)

    def _of(self, key: FeatureKey) -> Mapping[KeptAt, FeatureCache]:
        context, now = self._job_context, self._split()
        if context.wire_rounding == NONE:
            return {KeptAt(key.cut): self._cache_of(key)}
        found = {KeptAt(key.cut, now): self._cache_of(key)}
        for split in range(key.cut + 1):
            other = replace(key, rounding=rounding_at(context, split))
            if split != now and self._is_begun(other):
                found[KeptAt(key.cut, split)] = self._cache_of(other)
        return found

    def shares(self, epoch: int | None = None) -> Mapping[KeptAt, Shares]:
        """Return what tells the shares that are kept, by cut: those that ``epoch`` finds, or of all views together."""
        views, first = self._job_context.views or 1, self._key_of(0)
        if first is None or views == 1 or epoch is not None:
            return self.of(0 if epoch is None else epoch)
        found: dict[KeptAt, list[FeatureCache]] = {}
        transform, seed = self._job_context.transforms[0], self._job_context.order.seed
        for view in range(min(views, MOST_VIEWS)):
            key = first if transform is None else replace(first, transform=transform.at(seed, view))
            if self._is_begun(key):
                for at, cache in self._of(key).items():
                    found.setdefault(at, []).append(cache)
        return {at: _Together(caches, views) for at, caches in found.items()}

    def rates(self, *, probe: bool) -> DiskRates:
        """Return the rates of their disk as measured; None for what was not.

        Args:
            probe: measure it for that alone, too. Where something is kept this is done in any case.
        """
        for cache in self.of().values():
            wanted = probe or cache.share(self._job_context.training_ids) > 0
            return cache.probed_rates() if wanted else cache.rates()
        return DiskRates(None, None)


def probe_ahead(folder: CacheFolder | None) -> None:
    """Begin to measure the disk of ``folder``, so that the first plan need not wait for it."""
    if folder is not None:
        threading.Thread(target=folder.probed_rates, name="hapi-cache-probe", daemon=True).start()


class _Together:
    """Caches of some of a run's views, as one."""

    def __init__(self, caches: Sequence[FeatureCache], views: int) -> None:
        self._caches, self._views = caches, views

    @property
    def admits(self) -> bool:
        """True while all of them have room."""
        return all(cache.admits for cache in self._caches)

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` in all views that is cached."""
        return float(np.sum([cache.share(ids) for cache in self._caches])) / self._views
