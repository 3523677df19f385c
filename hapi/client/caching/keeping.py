"""A session's caches: which samples and features are kept here, and whether what was kept may be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hapi.cache.samples import SampleCache
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.filling import ComputedRows, Filling
from hapi.client.caching.sources import PassFeatures
from hapi.client.job_context import JobContext
from hapi.client.planning.cache_forecast import close_caches, open_caches
from hapi.client.planning.controller import SplitController
from hapi.closing import Closing
from hapi.trace import Tracer
from hapi.wire.references import DatasetReference

log = logging.getLogger("hapi.client")


class Keeping(Closing):
    """Features that a session keeps on this side. Not thread-safe, but what it hands out is."""

    def __init__(self, job_context: JobContext, tracer: Tracer) -> None:
        """Open the caches that ``job_context`` has a folder for."""
        self.samples: Mapping[DatasetReference, SampleCache] = open_caches(job_context)
        """Caches of stored samples that may be used, by dataset."""
        self._samples = dict(self.samples)
        self._filling = Filling(tracer)
        self.fills = False
        """True while features that are computed are kept."""

    def follow(self, planning: SplitController | None) -> None:
        """Take over what the plan has found worth keeping; between two passes."""

    def source(self, counts: KeptCounts, *, validation: bool) -> PassFeatures | None:
        """Return the kept features of the samples of a pass that begins; None when none are used."""
        return None

    def keep(self, source: PassFeatures, computed: ComputedRows) -> None:
        """Keep features that were computed, behind the training."""
        self._filling.offer(source.cache, computed, source.counts)

    def distrust(self) -> None:
        """Use nothing more of what was kept: a server was left that some of it may come from."""
        if self.samples:
            log.warning(
                "--cache-dir may hold samples of that server: it is not used any more; empty it with "
                "'hapi cache clear'"
            )
        self.samples = {}

    def flush(self) -> None:
        """Make what was kept available to other processes."""
        for cache in self._samples.values():
            cache.flush()

    def close(self) -> None:
        """Flush, and give the folder back."""
        self._filling.close()
        close_caches(self._samples)
