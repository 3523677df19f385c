"""A first plan for servers that others keep busy: the part of them that a new job is left, by what they tell. Pure.

A new job has measured no wait. What its servers tell when it connects stands in its profile, until its own waits show
more (:mod:`hapi.client.planning.drift`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hapi.profiler.cost import pipeline_at
from hapi.profiler.fit import SMALLEST_SHARE
from hapi.profiler.profile import Job, Profile


def with_waits(profile: Profile, job: Job, waits: Sequence[float]) -> Profile:
    """Return ``profile`` with the share of the servers that others leave now, whatever it was when it was measured.

    A job keeps as many requests at a server as that works on at a time. While others take all of these places, it gets
    the part of them that its own requests' work has of all that is done between two of them. The wait is in the share:
    a request is not priced as waiting beside that.

    Args:
        profile: of an earlier run; of its ranks each has the same part.
        job: the training.
        waits: seconds that each request of a new job would wait, one for each server that told it; without any the
            profile stays as it is.
    """
    if not waits:
        return profile
    servers = profile.server.servers
    request = pipeline_at(profile, job, profile.last_split).server_busy(min(job.request_size, job.bs))
    own = request * servers * max(1, profile.server.concurrency // servers)
    left = [1.0 if wait <= 0 or own <= 0 else own / (own + wait) for wait in waits]
    share = max(SMALLEST_SHARE, sum(left) / len(left) / profile.ranks)
    return replace(profile, server=replace(profile.server, share=share, waiting_seconds=0.0))
