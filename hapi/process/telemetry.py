"""Spans of requests and steps for OpenTelemetry, where its packages are installed and the environment asks for them.

The variables are OpenTelemetry's own: ``OTEL_TRACES_EXPORTER``, ``OTEL_EXPORTER_OTLP_ENDPOINT``, sampling, attributes.
Without them nothing is imported, and without spans nothing is called in a request or step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from hapi.errors import UsageError
from hapi.trace import TRACE_PARENT, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("hapi")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PARENT = "traceparent"


def asked_for(environment: Mapping[str, str]) -> str:
    """Return the variable that asks for spans; empty where none does."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter == "none":
        return ""
    named = ("OTEL_TRACES_EXPORTER", *_ENDPOINTS)
    return next((name for name in named if environment.get(name, "").strip()), "")


def open_telemetry(service: str, environment: Mapping[str, str]) -> Telemetry | None:
    """Return where spans go; None where nothing asks for them, or, with a warning, without the packages.

    Args:
        service: name of the service, unless ``OTEL_SERVICE_NAME`` names another.
        environment: OpenTelemetry's variables.

    Raises:
        UsageError: the exporter is not known or not installed.
    """
    variable = asked_for(environment)
    if not variable:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "%s is set, but OpenTelemetry is not installed, so no spans are sent: pip install 'hapi-split[otel]'",
            variable,
        )
        return None
    # Resource.create lets OTEL_RESOURCE_ATTRIBUTES win only where nothing is given here.
    name = environment.get("OTEL_SERVICE_NAME", "").strip() or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(environment)))
    return Telemetry(provider)


def _exporter(environment: Mapping[str, str]) -> Any:
    """The exporter that the environment names, as installed packages offer it."""
    name = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    if name == "otlp":
        protocol = next((environment[p].strip() for p in _PROTOCOLS if environment.get(p, "").strip()), "")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = entry_points(group="opentelemetry_traces_exporter")
    if name not in found.names:
        raise UsageError(
            f"OTEL_TRACES_EXPORTER: {name[:80]} is not installed; there are: {', '.join(sorted(found.names)) or 'none'}"
        )
    try:
        return found[name].load()()
    except Exception as error:  # the exporter's own, which have no class here
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"OpenTelemetry's exporter {name} cannot be used: {text}") from None


@contextmanager
def open_tracer(process: str, environment: Mapping[str, str], *, enabled: bool) -> Iterator[Tracer]:
    """Return a tracer for the ``with`` block, which also sends spans where the environment asks for them.

    Args:
        process: its name.
        environment: see :func:`open_telemetry`.
        enabled: record for a file.
    """
    telemetry = open_telemetry(process, environment)
    if telemetry is None:
        yield Tracer(enabled=enabled, process=process)
        return
    try:
        yield TelemetryTracer(telemetry, enabled=enabled, process=process)
    finally:
        telemetry.close()


class Telemetry:
    """Spans of one process. Thread-safe; what cannot be sent in time is dropped."""

    def __init__(self, provider: TracerProvider) -> None:
        """Record with ``provider``."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._tracer = provider, provider.get_tracer("hapi")
        self._propagator = TraceContextTextMapPropagator()
        # Of one clock: spans must not jump when the machine's is set.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def answered(
        self, name: str, seconds: float, facts: Mapping[str, Any], began: Mapping[str, float]
    ) -> None:
        """Record a request that was just answered, with a child for each stage as long as its seconds in sum.

        Args:
            name: its route.
            seconds: from its arrival until now.
            facts: fields of its line in the log; ``stages`` has seconds by stage.
            began: monotonic seconds at which each stage first began.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now = time.monotonic()
        context = self._propagator.extract({_PARENT: str(facts.get(_PARENT, ""))})
        attributes = {
            f"hapi.{key}": value for key, value in facts.items() if isinstance(value, str | int | float)
        }
        method = str(facts.get("method", ""))
        status = int(facts.get("status", 0))
        attributes |= {"http.request.method": method, "http.route": name, "http.response.status_code": status}
        span = self._tracer.start_span(
            f"{method} {name}", context, SpanKind.SERVER, attributes, start_time=self._ns(now - seconds)
        )
        if not span.is_recording():
            return
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, str(facts.get("detail", ""))[:200]))
        inside = set_span_in_context(span, context)
        for stage, length in facts.get("stages", {}).items():
            start = began.get(stage, now - length)
            self._tracer.start_span(stage, inside, start_time=self._ns(start)).end(self._ns(start + length))
        span.end(self._ns(now))

    @contextmanager
    def working(self, name: str, attributes: Mapping[str, Any], *, asks: bool) -> Iterator[None]:
        """Record the ``with`` block; with ``asks`` servers are told that they work for it."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.CLIENT if asks else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(name, kind=kind, attributes=dict(attributes)):
            carrier: dict[str, str] = {}
            if asks:
                self._propagator.inject(carrier)
            before = TRACE_PARENT.set(carrier.get(_PARENT, ""))
            try:
                yield
            finally:
                TRACE_PARENT.reset(before)

    def close(self) -> None:
        """Send what there is, and end the thread that does."""
        self._provider.shutdown()

    def _ns(self, monotonic: float) -> int:
        return int(monotonic * 1e9) + self._epoch_ns


class TelemetryTracer(Tracer):
    """A tracer whose spans of batches go to OpenTelemetry as well: requests, frozen layers and steps."""

    def __init__(self, telemetry: Telemetry, *, enabled: bool, process: str) -> None:
        """Record for a file too if ``enabled``."""
        super().__init__(enabled=enabled, process=process)
        self._telemetry = telemetry

    def span(self, name: str, track: str, **arguments: Any) -> AbstractContextManager[None]:
        """See :meth:`Tracer.span`."""
        own = super().span(name, track, **arguments)
        return self._both(own, name, track, arguments) if "batch" in arguments else own

    @contextmanager
    def _both(
        self, own: AbstractContextManager[None], name: str, track: str, arguments: Mapping[str, Any]
    ) -> Iterator[None]:
        attributes = {f"hapi.{key}": value for key, value in arguments.items()}
        with own, self._telemetry.working(name, attributes, asks=track == "network"):
            yield
