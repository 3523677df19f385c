"""The next forward pass on a device: that of the tenant that used the device least lately. Pure: it is told
the time.

Usage is seconds on the device over the tenant's weight, and decays, as in fair-share schedulers (Kay and
Lauder: A fair share scheduler, CACM 1988). A tenant that asks rarely has used less than those that keep the
device busy, so its COS batches go first, all of them: its request takes hardly longer than on an idle device.
Start-time fair queueing, which shares out the slots before (:mod:`hapi.server.scheduling.fair_queue`), would
give it one of as many turns as tenants run. No tenant starves: a running one is charged, and a waiting one is
forgiven. Within a tenant the older request goes first, so that one is done before the next takes memory for
longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hapi.server.scheduling.fair_queue import Tenant

HALF_LIFE = 20.0
"""Seconds after which half of a tenant's use is forgotten; longer than any request should take on the device."""
FORGOTTEN = 1e-3
"""Seconds of use that count as none."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Waiting(Generic[T]):
    """One forward pass that waits."""

    tenant: Tenant
    order: int
    """Number of its request, in the order in which requests began."""
    number: int
    """Number in the order of arrival."""
    item: T


class DeviceScheduler(Generic[T]):
    """The forward passes that wait for one device. Not thread-safe; ``now`` never runs backwards."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[T]] = []
        self._used: dict[Tenant, tuple[float, float]] = {}
        """Seconds, and when that was."""
        self._entered = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tenant: Tenant, order: int, item: T) -> None:
        """Add a waiting ``item``."""
        self._entered += 1
        self._waiting.append(Waiting(tenant, order, self._entered, item))

    def next(self, now: float) -> T:
        """Remove and return the next item; IndexError when none waits."""
        if not self._waiting:
            raise IndexError("no forward pass waits")
        used = {
            tenant: self.used(tenant, now) / tenant.weight for tenant in {w.tenant for w in self._waiting}
        }
        first = min(self._waiting, key=lambda w: (used[w.tenant], w.order, w.number))
        self._waiting.remove(first)
        return first.item

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """Remove and return all waiting items that are ``wanted``, oldest first."""
        taken = [w for w in self._waiting if wanted(w.item)]
        if taken:
            self._waiting = [w for w in self._waiting if w not in taken]
        return [w.item for w in taken]

    def charge(self, tenant: Tenant, seconds: float, now: float) -> None:
        """Charge ``tenant`` for ``seconds`` on the device."""
        self._used[tenant] = (self.used(tenant, now) + seconds, now)
        if len(self._used) > 1024:
            self._forget(now)

    def used(self, tenant: Tenant, now: float) -> float:
        """Seconds of the device that count against ``tenant`` still."""
        seconds, since = self._used.get(tenant, (0.0, now))
        return float(seconds * 0.5 ** ((now - since) / HALF_LIFE))

    def _forget(self, now: float) -> None:
        for tenant in list(self._used):
            if self.used(tenant, now) < FORGOTTEN:
                del self._used[tenant]
