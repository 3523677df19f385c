"""The trainer's caches of stored samples: opening and closing them."""

from __future__ import annotations

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
