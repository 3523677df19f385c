"""Shares of their time in which jobs' trainers wait for batches, as their requests tell them. Told the time.

A job is remembered while it has a request here, and for a minute after. One that tells nothing counts for none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEPT_SECONDS = 60.0
"""Seconds after its last request in which a job counts."""
NEWEST = 0.5
"""Weight of the newest share among those of its job; the trainer's own is a mean already."""
MOST_JOBS = 256
"""Jobs of a tenant that are remembered; of more, the one without a request for longest is forgotten."""


@dataclass(eq=False)
class _Job:
    share: float
    open: int = 0
    """Requests that have come and are not over."""
    seen: float = 0.0
    """Time at which the last one came or was over."""

    def lives(self, now: float) -> bool:
        return bool(self.open) or now - self.seen < KEPT_SECONDS


class Stalls:
    """Shares by tenant and job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, OrderedDict[str, _Job]] = {}

    def begin(self, tenant: str, job: str, share: float | None, now: float) -> None:
        """Note that a request of ``job`` has come, and the share, 0 to 1, that it tells (None: nothing).

        Call :meth:`end` when it is over.
        """
        if share is None:
            return
        with self._lock:
            jobs = self._tenants.setdefault(tenant, OrderedDict())
            found = jobs.setdefault(job, _Job(share))
            jobs.move_to_end(job)
            found.share += NEWEST * (share - found.share)
            found.open, found.seen = found.open + 1, now
            while len(jobs) > MOST_JOBS or not next(iter(jobs.values())).lives(now):
                jobs.popitem(last=False)

    def end(self, tenant: str, job: str, share: float | None, now: float) -> None:
        """Note that a request is over, of which :meth:`begin` was told the same."""
        with self._lock:
            found = None if share is None else self._tenants.get(tenant, OrderedDict()).get(job)
            if found is not None and found.open:
                found.open, found.seen = found.open - 1, now

    def shares(self, tenants: Iterable[str], now: float) -> list[float]:
        """Return the share, 0 to 1, of each job of ``tenants``."""
        with self._lock:
            jobs = [job for tenant in tenants for job in self._tenants.get(tenant, {}).values()]
            return [job.share for job in jobs if job.lives(now)]

    def share(self, tenant: str, now: float) -> float:
        """Return the mean share of the tenant's jobs; 0 without one."""
        return mean(self.shares([tenant], now))

    def keep(self, tenants: frozenset[str]) -> None:
        """Forget all but ``tenants``."""
        with self._lock:
            self._tenants = {name: jobs for name, jobs in self._tenants.items() if name in tenants}


def mean(shares: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(shares) / len(shares) if shares else 0.0
