"""The trainer's sample caches: opening them, and a plan's expectation of them."""

from __future__ import annotations

from hapi.arrays import IntArray
from hapi.cache.samples import SampleCache
from hapi.client.job_context import JobContext
from hapi.wire.references import DatasetReference


def open_caches(job_context: JobContext) -> dict[DatasetReference, SampleCache]:
    """Open a cache of stored samples for each dataset of the run.

    There is none without a folder, or where no batch can run at split 0. A store on this machine's own disk needs
    one only with ``--cache on``.
    """
    found: dict[DatasetReference, SampleCache] = {}
    folder, embedded = job_context.cache_folder, job_context.embedded
    on_this_disk = embedded is not None and embedded.on_local_disk and job_context.cache_mode != "on"
    if (
        folder is not None
        and not on_this_disk
        and (job_context.strategy is not None or job_context.split == 0)
    ):
        try:
            for description in (job_context.description, job_context.held_out):
                reference = description.reference
                if reference not in found:
                    found[reference] = SampleCache(
                        folder, reference, description.count, description.label_form
                    )
        except BaseException:
            close_caches(found)
            raise
    return found


def close_caches(caches: dict[DatasetReference, SampleCache]) -> None:
    """Close them all."""
    for cache in caches.values():
        cache.close()


class Expected:
    """Share of an epoch's samples that need not cross the network at split 0."""

    def __init__(
        self, cache: SampleCache, ids: IntArray, mean_bytes: float, *, epochs: int, trainers: int
    ) -> None:
        """``ids``, of ``mean_bytes`` stored bytes each, are used in each of ``epochs``, shared by ``trainers``."""
        self._cache, self._ids, self._epochs = cache, ids, epochs
        self._room = cache.room(len(ids), mean_bytes)
        self._left_out = 1 - 1 / trainers
        """The part of the samples that this trainer does not see in an epoch."""

    def __call__(self, epoch: int) -> tuple[float, float]:
        """Return two shares from 0 to 1: in ``epoch``, and in the mean from it on, if all run at split 0."""
        now, left = self._cache.share(self._ids), max(1, self._epochs - epoch)
        lacking = max(0.0, self._room - now) if self._cache.admits else 0.0
        # What lacks becomes less by the same factor in each epoch: the mean of a geometric series.
        mean_lacking = lacking * (1 - self._left_out**left) / (1 - self._left_out) / left
        return now, now + lacking - mean_lacking
