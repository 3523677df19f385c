"""The operator's view of a server: the same state as a JSON document (``/v1/status``) and as metrics.

Everything is read on request, in a separate thread: neither a dashboard nor ten thousand tenants hold up the
event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hapi import __version__
from hapi.process.threads import Threads
from hapi.server.http.connections import REASONS as REFUSALS
from hapi.server.http.connections import Connections
from hapi.server.http.response_stream import finished
from hapi.server.lifecycle.log_limits import dropped_lines
from hapi.server.scheduling.admission import REASONS, Admission
from hapi.server.scheduling.fair_queue import LEAST_COST, Tenant
from hapi.server.scheduling.stalls import mean
from hapi.server.scrub import Scrub
from hapi.server.service import Service
from hapi.server.settings import ServiceSettings
from hapi.server.status import Board, DeviceStatus, TenantCounts
from hapi.wire.frames import WIRE_VERSION

T = TypeVar("T")

MOST_LOOKS, LOOK_SECONDS = 256, 60.0
"""Looks that may wait, and for how long."""
MOST_SHOWN = 100
"""Requests and tenants in a status document; of more, those with the most to do."""
SECRET = ("store", "allow_model", "cache_dir", "providers", "advertise", "provider_ca")
"""Settings that are not shown: a store's URL may hold a key, a path or another server's address tells of machines."""


class Looks:
    """Turns at looking at a server, shared out among tenants: one that looks all the time keeps nobody else from it."""

    def __init__(self, threads: Threads, shed: Callable[[Tenant, str], None]) -> None:
        """Look in ``threads``; ``shed`` is told the tenant and the reason of each look that is sent away."""
        self._threads = threads
        self.admission = Admission(1, MOST_LOOKS, shed)

    async def see(self, tenant: Tenant, allowed: bool, read: Callable[[Tenant], T]) -> T:
        """Return what ``tenant`` sees by ``read``; ``HTTPNotFound`` unless that is ``allowed``."""
        if not allowed:
            raise web.HTTPNotFound
        async with self.admission.slot(tenant, LEAST_COST, LOOK_SECONDS):
            return await finished(self._threads.submit(read, tenant), lambda _: None)


class Overview:
    """Reads the server's state. Thread-safe."""

    def __init__(
        self,
        service: Service,
        admission: Admission,
        board: Board,
        connections: Connections,
        scrub: Scrub,
    ) -> None:
        self._service = service
        self._admission = admission
        self._board = board
        self._connections = connections
        self._scrub = scrub

    # -- as a document ---------------------------------------------------------------------------------------

    def document(self, state: str, viewer: Tenant) -> dict[str, Any]:
        """Return the answer to ``GET /v1/status``: of tenants, requests and errors those that ``viewer`` may see."""
        now, service, admission = time.monotonic(), self._service, self._admission
        seen = list(filter(viewer.may_see, self._board.tenants))
        tenants = sorted(map(self._tenant, seen), key=_busiest)
        validity = self._board.validity
        running = [r for r in self._board.requests() if viewer.may_see(r.context.tenant)]
        lost = service.watch.lost
        return {
            "hapi": __version__,
            "wire": WIRE_VERSION,
            "server": service.id,
            "state": state,
            "time": round(time.time(), 3),
            "uptime": round(now - self._board.started, 1),
            "settings": shown(service.settings),
            "devices": [_device(d) for d in service.devices()],
            "host_memory": service.host.status(),
            "queue": {
                "running": admission.running,
                "slots": service.slots,
                "queued": admission.queued,
                "max_queued": service.settings.max_queued,
            },
            "certificate": "" if validity is None else validity.problem(time.time()),
            "stuck": service.watch.stuck(),
            "lost_threads": {"now": lost.count, "ever": lost.ever, "most": lost.limit},
            "scrub": self._scrub.to_json(),
            "trainers": self._trainers(seen),
            "tenants": tenants[:MOST_SHOWN],
            "tenants_in_all": len(tenants),
            "running": [request.to_json(now) for request in running[:MOST_SHOWN]],
            "running_in_all": len(running),
            "errors": [
                asdict(e) for e in self._board.errors() if viewer.access.whole or e.tenant == viewer.name
            ],
        }

    def _trainers(self, tenants: Sequence[Tenant]) -> dict[str, Any]:
        """The trainers of ``tenants``: how many jobs tell of themselves, and how they wait."""
        shares = self._board.stalls.shares([t.name for t in tenants], time.monotonic())
        wait = max(map(self._trainer_wait, tenants), default=0.0)
        return {"jobs": len(shares), "stalled": round(mean(shares), 3), "wait": round(wait, 3)}

    def _trainer_wait(self, tenant: Tenant) -> float:
        """The tenant's expected wait, times the share of their time in which its trainers wait."""
        share = self._board.stalls.share(tenant.name, time.monotonic())
        return share and share * self._admission.expected_wait(tenant)

    def _tenant(self, tenant: Tenant) -> dict[str, Any]:
        counts = self._board.counts_of(tenant)
        queued, running = self._admission.of(tenant)
        return {
            "name": tenant.name,
            "weight": tenant.weight,
            "queued": queued,
            "running": running,
            "served": counts.served,
            "shed": {reason: counts.shed[reason] for reason in REASONS},
            "sent_bytes": counts.sent_bytes,
            "cost_seconds": round(counts.cost, 3),
            "expected_wait": round(self._admission.expected_wait(tenant), 3),
            "trainer_wait": round(self._trainer_wait(tenant), 3),
        }

    # -- as metrics ------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        """Return states and counts that :class:`hapi.server.http.metrics.Metrics` does not count."""
        admission, account = self._admission, self._service.account
        yield _gauge("hapi_requests_running", "Requests that hold a slot.", admission.running)
        yield _gauge("hapi_requests_queued", "Requests that wait for a slot.", admission.queued)
        yield _gauge("hapi_slots", "Requests that may hold a slot.", self._service.slots)
        yield CounterMetricFamily(
            "hapi_busy_seconds", "Seconds with at least one request at work.", account.busy.seconds
        )
        yield CounterMetricFamily(
            "hapi_decoders_replaced",
            "Decoding processes that died and were replaced.",
            self._service.decoders.replaced,
        )
        yield CounterMetricFamily(
            "hapi_log_lines_dropped",
            "Lines of the log that were dropped, since nobody read it.",
            dropped_lines(),
        )
        yield _gauge("hapi_connections", "Connections that are open.", self._connections.open)
        refused = self._connections.refused
        yield _by(
            "reason",
            "hapi_connections_refused",
            "Connections refused or ended, and why.",
            {reason: refused[reason] for reason in REFUSALS},
        )
        ends = GaugeMetricFamily(
            "hapi_certificate_expiry_timestamp", "Time at which the certificate expires."
        )
        if self._board.validity is not None:
            ends.add_metric((), self._board.validity.last)
        yield ends
        watch = self._service.watch
        yield _gauge("hapi_stuck", "1 while the server's work does not move.", bool(watch.stuck()))
        yield _gauge(
            "hapi_threads_lost",
            "Threads that wait for the store although their request was given up.",
            watch.lost.count,
        )
        yield CounterMetricFamily(
            "hapi_threads_ever_lost",
            "Threads that were lost, those that came back included.",
            watch.lost.ever,
        )
        yield _by(
            "source",
            "hapi_feature_samples",
            "Samples of feature requests by what gave their features.",
            self._service.sharing.counts.all(),
        )
        yield _by(
            "source",
            "hapi_pack_bytes",
            "Bytes of stored models that were read, by where they came from.",
            self._service.providers.counts(),
        )
        yield CounterMetricFamily(
            "hapi_provider_failures",
            "Reads of another server that failed, so that the next or the store was asked.",
            self._service.providers.failures,
        )
        yield from _host_metrics(self._service.host.status())
        yield from self._scrub_metrics()
        wall, cpu = account.totals()
        yield _by("stage", "hapi_stage_seconds", "Wall seconds of requests by stage.", wall)
        yield _by("stage", "hapi_stage_cpu_seconds", "CPU seconds of requests by stage.", cpu)
        yield from _device_metrics(self._service.devices())
        yield from self._tenant_metrics()

    def _scrub_metrics(self) -> Iterator[Metric]:
        scrub = self._scrub
        yield CounterMetricFamily("hapi_scrub_bytes", "Bytes read to find damage.", scrub.bytes)
        damaged = GaugeMetricFamily(
            "hapi_scrub_damaged", "Findings of the last look at a dataset or model.", labels=["dataset"]
        )
        for name, findings in scrub.damaged.items():
            damaged.add_metric([name], findings)
        yield damaged
        yield _gauge(
            "hapi_scrub_last_complete_timestamp",
            "Time at which everything had last been read, 0 before the first.",
            scrub.last_complete,
        )

    def _tenant_metrics(self) -> Iterator[Metric]:
        admission, tenants = self._admission, self._board.tenants
        gauges: tuple[tuple[str, str, Callable[[Tenant], float]], ...] = (
            ("hapi_tenant_queued", "Requests that wait for a slot.", lambda t: admission.of(t)[0]),
            ("hapi_tenant_running", "Requests that hold a slot.", lambda t: admission.of(t)[1]),
            (
                "hapi_tenant_expected_wait_seconds",
                "Expected wait of the tenant's next request in the queue.",
                admission.expected_wait,
            ),
            (
                "hapi_trainer_wait_seconds",
                "Expected wait, times the share of their time in which the tenant's trainers wait for batches.",
                self._trainer_wait,
            ),
        )
        for name, text, read in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["tenant"])
            for tenant in tenants:
                gauge.add_metric([tenant.name], read(tenant))
            yield gauge
        counters: tuple[tuple[str, str, Callable[[TenantCounts], float]], ...] = (
            ("hapi_tenant_served", "Requests answered wholly.", lambda c: c.served),
            (
                "hapi_tenant_cost_seconds",
                "Seconds of the scarcest resource that requests used.",
                lambda c: c.cost,
            ),
            ("hapi_tenant_sent_bytes", "Bytes of answers sent.", lambda c: c.sent_bytes),
        )
        for name, text, count in counters:
            yield _by("tenant", name, text, {t.name: count(self._board.counts_of(t)) for t in tenants})
        shed = CounterMetricFamily(
            "hapi_tenant_shed", "Requests sent away, and why.", labels=["tenant", "reason"]
        )
        for tenant in tenants:
            counts = self._board.counts_of(tenant)
            for reason in REASONS:
                shed.add_metric([tenant.name, reason], counts.shed[reason])
        yield shed


_OF_DEVICES: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "hapi_device_requests", "Requests given to the device and not over.", "requests"),
    (GaugeMetricFamily, "hapi_device_forwards_running", "Forward passes that run.", "forwards"),
    (GaugeMetricFamily, "hapi_device_forwards_waiting", "Forward passes that wait.", "forwards_waiting"),
    (GaugeMetricFamily, "hapi_device_memory_budget_bytes", "Budget of the device's memory.", "budget_bytes"),
    (
        GaugeMetricFamily,
        "hapi_device_allocated_bytes",
        "Bytes that torch holds on a GPU.",
        "allocated_bytes",
    ),
    (GaugeMetricFamily, "hapi_device_memory_waiting", "Requests that wait for memory.", "memory_waiting"),
    (CounterMetricFamily, "hapi_out_of_memory_caught", "Passes out of memory, halved.", "out_of_memory"),
    (CounterMetricFamily, "hapi_merged_passes", "Passes that ran together with others.", "merged"),
    (CounterMetricFamily, "hapi_adaptations", "Times that COS batches were chosen.", "adaptations"),
    (CounterMetricFamily, "hapi_adaptation_seconds", "Seconds in which they were chosen.", "adapt_seconds"),
    (GaugeMetricFamily, "hapi_model_cache_bytes", "Bytes of layers that are loaded.", "resident_bytes"),
    (CounterMetricFamily, "hapi_model_cache_hits", "Requests whose layers were resident.", "cache_hits"),
    (CounterMetricFamily, "hapi_model_cache_misses", "Times that layers were loaded.", "cache_misses"),
)
"""Kind, name without ``_total``, text and the field of :class:`DeviceStatus`."""


def _host_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    taken = GaugeMetricFamily(
        "hapi_host_memory_bytes", "Bytes of the server's own memory that are taken.", labels=["kind"]
    )
    for kind, nbytes in status["reserved"].items():
        taken.add_metric([kind], nbytes)
    yield taken
    yield _gauge("hapi_host_memory_waiting", "Requests that wait for the server's memory.", status["waiting"])
    if status["budget_bytes"] is not None:
        yield _gauge(
            "hapi_host_memory_budget_bytes", "Budget of the server's own memory.", status["budget_bytes"]
        )


def _device_metrics(devices: Sequence[DeviceStatus]) -> Iterator[Metric]:
    memory = GaugeMetricFamily(
        "hapi_device_memory_bytes", "Bytes of the budget that are taken.", labels=["device", "kind"]
    )
    for device in devices:
        for kind, nbytes in device.memory.items():
            memory.add_metric([device.name, kind], nbytes)
    yield memory
    for kind_of, name, text, field in _OF_DEVICES:
        family = kind_of(name, text, labels=["device"])
        for device in devices:
            value = getattr(device, field)
            if value is not None:  # what is not known is not 0
                family.add_metric([device.name], value)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family


def shown(settings: ServiceSettings) -> dict[str, Any]:
    """Return the settings that every client with a token may know."""
    values = {f.name: getattr(settings, f.name) for f in fields(ServiceSettings) if f.name not in SECRET}
    return {**values, "batching": settings.policy}


def _device(status: DeviceStatus) -> dict[str, Any]:
    return {**asdict(status), "memory": dict(status.memory), "adapt_seconds": round(status.adapt_seconds, 6)}


def _busiest(tenant: Mapping[str, Any]) -> tuple[float, float, str]:
    return -(tenant["running"] + tenant["queued"]), -tenant["cost_seconds"], tenant["name"]
