"""Prometheus metrics of one server process.

Names follow Prometheus' conventions: base units, counters end in ``_total``. deploy/prometheus/README.md lists all of
them, and a test compares it with the output. Events of a request are counted when they happen; states, and
counts kept elsewhere, are read when the metrics are requested (:mod:`hapi.server.http.overview`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hapi import __version__
from hapi.errors import (
    DataError,
    DeviceMemoryError,
    HapiError,
    HostMemoryError,
    ShortageError,
    StoreError,
    StoreUnavailableError,
)
from hapi.server.http.slow_reader import REASONS
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.frames import WIRE_VERSION

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_COS_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_WATCHED = (
    StoreError,
    StoreUnavailableError,
    DataError,
    DeviceMemoryError,
    HostMemoryError,
    ShortageError,
    HapiError,
)
"""Errors that begin at 0, so that the first one is seen as an increase."""


class _Snapshot(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read while it is registered


class Metrics:
    """The metrics of a server; a registry of its own, so that several can live in one process."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Make the metrics; ``read`` returns those that are found out on request."""
        # A time for each counter, which nobody asks for; the switch is of the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "hapi_requests_total", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "hapi_request_seconds",
            "Seconds of a streamed request, its wait included.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.cos_batch = Histogram(
            "hapi_cos_batch_samples",
            "COS batch chosen for a request.",
            ["device"],
            buckets=_COS_BATCH,
            registry=registry,
        )
        self.bytes_sent = Counter(
            "hapi_sent_bytes_total", "Bytes of frames and packs sent.", registry=registry
        )
        self.samples = Counter(
            "hapi_samples_total", "Samples of requests that had a slot.", registry=registry
        )
        self.cancelled = Counter(
            "hapi_cancelled_total", "Requests whose client went away or was too slow.", registry=registry
        )
        self.errors = Counter(
            "hapi_errors_total", "Requests that ended in an error.", ["kind"], registry=registry
        )
        for kind in _WATCHED:
            self.errors.labels(kind.slug)
        self._build_info()
        registry.register(_Snapshot(read))
        ProcessCollector(registry=registry)

        self.dropped = Counter(
            "hapi_dropped_readers_total",
            "Readers that lost their slot: silent, slow while others waited, or late.",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:  # so that a rate can be taken from the first one on
            self.dropped.labels(reason)

    def _build_info(self) -> None:
        names = {
            "version": __version__,
            "wire": str(WIRE_VERSION),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        info = Gauge("hapi_build_info", "1, with versions as labels.", list(names), registry=self.registry)
        info.labels(**names).set(1)

    def render(self, viewer: Tenant) -> bytes:
        """Return the text exposition format, of tenants and datasets what ``viewer`` may see."""
        return generate_latest(self.registry if viewer.access.whole else _Seen(self.registry, viewer))


class _Seen(CollectorRegistry):
    """The part of a registry that a tenant may see: of tenants itself, no names of datasets."""

    def __init__(self, whole: CollectorRegistry, viewer: Tenant) -> None:
        super().__init__()
        self._whole, self._viewer = whole, viewer

    def collect(self) -> Iterable[Metric]:
        for metric in self._whole.collect():
            seen = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            seen.samples = [s for s in metric.samples if self._may_see(s.labels)]
            yield seen

    def _may_see(self, labels: Mapping[str, str]) -> bool:
        return labels.get("tenant", self._viewer.name) == self._viewer.name and "dataset" not in labels
