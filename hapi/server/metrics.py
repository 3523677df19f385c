"""Prometheus metrics of one server process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hapi.server.fair_queue import Tenant
from hapi.server.pace import REASONS
from hapi.wire.messages import STAGES

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """The counters of a server; a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hapi_requests_total",
            "Requests by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "hapi_request_seconds",
            "Seconds per streamed request.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        stage_seconds = Counter(
            "hapi_stage_seconds_total", "Seconds per stage of requests.", ["stage"], registry=self.registry
        )
        self.stage_seconds = {stage: stage_seconds.labels(stage) for stage in STAGES}
        self.bytes_sent = Counter("hapi_sent_bytes_total", "Bytes of frames sent.", registry=self.registry)
        self.samples = Counter("hapi_samples_total", "Samples in completed requests.", registry=self.registry)
        self.shed = self._by_tenant("hapi_tenant_shed_total", "Requests sent away, and why.", "reason")
        self.served = self._by_tenant("hapi_tenant_served_total", "Requests answered wholly.")
        self.cost = self._by_tenant(
            "hapi_tenant_cost_seconds_total", "Seconds of the scarcest resource that requests used."
        )
        self.sent = self._by_tenant("hapi_tenant_sent_bytes_total", "Bytes of answers sent.")
        self.cancelled = Counter(
            "hapi_cancelled_total", "Requests whose client went away or was too slow.", registry=self.registry
        )

        self.dropped = Counter(
            "hapi_dropped_readers_total",
            "Readers that lost their slot: silent, slow while others waited, or late.",
            ["reason"],
            registry=self.registry,
        )
        for reason in REASONS:  # so that a rate can be taken from the first one on
            self.dropped.labels(reason)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def _by_tenant(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["tenant", *labels], registry=self.registry)

    def tenant_gauge(
        self, name: str, text: str, tenants: Iterable[Tenant], read: Callable[[Tenant], float]
    ) -> None:
        """A gauge with a value for each tenant, read when it is scraped."""
        gauge = Gauge(name, text, ["tenant"], registry=self.registry)
        for tenant in tenants:
            gauge.labels(tenant.name).set_function(partial(read, tenant))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
