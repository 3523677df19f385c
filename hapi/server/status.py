"""State of a server for its operator: devices, requests at work, tenants' counts, the last errors.

It is cheap: a few assignments for each request and COS batch. A request that is over leaves nothing, or, if
it failed, one line in a list of bounded length.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hapi.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    HapiError,
    ShortageError,
    UnauthorizedError,
)
from hapi.server.context import RequestContext
from hapi.server.lifecycle.certificate import Validity
from hapi.server.scheduling.costs import Request
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.scheduling.stalls import Stalls
from hapi.server.tenants.accounting import Account, Accounts
from hapi.wire.messages import ExtractRequest, SamplesRequest

ERRORS_KEPT = 50
MAX_LINE = 400
"""Most characters of an error that are kept."""
EXPECTED = (BusyError, DeadlineError, DrainingError, UnauthorizedError, ForbiddenError, ShortageError)
"""Answers of a healthy server; they have counters, and whoever causes them must not push the errors out of the list."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """One device at a moment."""

    name: str
    requests: int
    """Given to it and not over."""
    forwards: int
    """Forward passes that run (several when they are merged)."""
    forwards_waiting: int
    memory: Mapping[str, int]
    """Bytes of the budget by :data:`MEMORY_KINDS`."""
    budget_bytes: int | None
    """None: unbounded, since the system does not tell the free memory."""
    allocated_bytes: int | None
    """Bytes that torch holds on a GPU; None on the CPU, where the process's size tells."""
    memory_waiting: int
    """Requests that wait for memory."""
    out_of_memory: int
    """Passes that ran out of memory and were made again with a smaller batch."""
    merged: int
    """Passes that ran together with others."""
    adaptations: int
    adapt_seconds: float
    resident_bytes: int
    """Bytes of loaded layers, in use or not."""
    cache_hits: int
    cache_misses: int
    cos_batch: int | None
    """The one chosen last; None before the first."""


MEMORY_KINDS = ("weights", "idle_weights", "activations")
"""Layers that requests use or are about to; layers kept for later ones; what admitted requests may use beside."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningRequest:
    """A request that holds a slot."""

    request_id: str
    asked: Request
    context: RequestContext
    waited: float
    """Seconds in the queue."""
    began: float = field(default_factory=time.monotonic)

    def to_json(self, now: float) -> dict[str, object]:
        """Return the entry for ``/v1/status``; ``now`` in ``time.monotonic`` seconds."""
        asked, progress = self.asked, self.context.progress
        kind, name, dataset, total = _what(asked)
        return {
            "id": self.request_id,
            "tenant": self.context.tenant.name,
            "kind": kind,
            "model": name,
            "dataset": dataset,
            "split": asked.split if isinstance(asked, ExtractRequest) else 0,
            "split_name": asked.split_name if isinstance(asked, ExtractRequest) else "",
            "device": progress.device,
            "cos_batch": progress.cos_batch,
            "done": progress.done,
            "total": total,
            "waited": round(self.waited, 3),
            "seconds": round(now - self.began, 3),
            "stages": list(progress.stages()),
        }


def _what(asked: Request) -> tuple[str, str, str, int]:
    """Kind, model, dataset, and how many samples or tensors."""
    if isinstance(asked, ExtractRequest):
        return "extract", asked.model.name, asked.dataset.name, len(asked.ids)
    if isinstance(asked, SamplesRequest):
        return "samples", "", asked.dataset.name, len(asked.ids)
    return "tensors", asked.name, "", len(asked.names)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error that ended a request."""

    at: float
    """Seconds since 1970."""
    request_id: str
    tenant: str
    path: str
    status: int
    kind: str
    """Its slug, see :mod:`hapi.errors`."""
    line: str


@dataclass
class TenantCounts:
    """Counts of one tenant so far."""

    served: int = 0
    """Requests answered wholly."""
    shed: Counter[str] = field(default_factory=Counter)
    """Requests sent away, by reason."""
    cost: float = 0.0
    """Seconds of the scarcest resource, see :mod:`hapi.server.scheduling.costs`."""
    sent_bytes: int = 0


class Board:
    """Thread-safe."""

    def __init__(self, tenants: Iterable[Tenant], accounts: Accounts | None = None) -> None:
        """Count for ``tenants``, and for ``accounts`` if there are any."""
        self.accounts = accounts
        self.validity: Validity | None = None
        """Validity of the server's certificate; None where there is none, or it does not tell."""
        self.stalls = Stalls()
        self.tenants: Sequence[Tenant] = ()
        self._counts: dict[str, TenantCounts] = {}
        self.change_tenants(tenants)
        self.started = time.monotonic()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: dict[int, RunningRequest] = {}
        self._errors: list[Failure] = []

    def change_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Have ``tenants`` from now on; those of a known name keep their counts."""
        tenants = tuple(tenants)
        self._counts = {t.name: self._counts.get(t.name) or TenantCounts() for t in tenants}
        self.tenants = tenants
        self.stalls.keep(frozenset(self._counts))

    def counts_of(self, tenant: Tenant) -> TenantCounts:
        """Return the counts of ``tenant``; those of one that is not here any more are forgotten at the next change."""
        return self._counts.setdefault(tenant.name, TenantCounts())

    def shed(self, tenant: Tenant, reason: str) -> None:
        """Count a request of ``tenant`` that is sent away."""
        self.counts_of(tenant).shed[reason] += 1
        self._account(tenant, Account(shed=1))

    def used(self, tenant: Tenant, use: Account) -> None:
        """Count a request of ``tenant`` that is over."""
        counts = self.counts_of(tenant)
        counts.cost += use.cost_seconds
        counts.sent_bytes += use.sent_bytes
        counts.served += use.served
        self._account(tenant, use)

    def sent_pack(self, tenant: Tenant, nbytes: int) -> None:
        """Count bytes of a pack that ``tenant`` was sent; they are in its account alone."""
        self._account(tenant, Account(pack_bytes=nbytes))

    def _account(self, tenant: Tenant, use: Account) -> None:
        if self.accounts is not None:
            self.accounts.add(tenant.name, use)

    @contextmanager
    def running(self, request: RunningRequest) -> Iterator[None]:
        """List ``request`` as at work inside the block."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = request
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    def failed(self, error: HapiError, *, request_id: str, tenant: str, path: str) -> None:
        """Record that ``error`` ended a request; errors that a healthy server gives are not kept.

        Of too many the oldest goes of the tenant that has the most.
        """
        if isinstance(error, EXPECTED):
            return
        failure = Failure(
            at=time.time(),
            request_id=request_id,
            tenant=tenant,
            path=path[:MAX_LINE],
            status=error.status,
            kind=error.slug,
            line=str(error)[:MAX_LINE],
        )
        with self._lock:
            self._errors.append(failure)
            if len(self._errors) > ERRORS_KEPT:  # a tenant that errs all the time hides only its own
                loudest, _ = Counter(kept.tenant for kept in self._errors).most_common(1)[0]
                self._errors.remove(next(kept for kept in self._errors if kept.tenant == loudest))

    def requests(self) -> Sequence[RunningRequest]:
        """Return those at work now, the oldest first."""
        with self._lock:
            return list(self._running.values())

    def errors(self) -> Sequence[Failure]:
        """Return the last errors, the newest first."""
        with self._lock:
            return list(reversed(self._errors))
