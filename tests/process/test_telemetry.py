"""Spans for OpenTelemetry: when they are wanted, how a request's and a batch's hang together."""

from __future__ import annotations

import logging
import sys
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hapi.errors import UsageError
from hapi.process.telemetry import Telemetry, TelemetryTracer, asked_for, open_telemetry, open_tracer
from hapi.trace import TRACE_PARENT, Tracer

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exported: InMemorySpanExporter) -> Telemetry:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return Telemetry(provider)


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "x"}, ""),
        (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, ""),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, ""),
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
    ],
)
def test_only_the_standard_variables_ask_for_spans(environment: dict[str, str], variable: str) -> None:
    assert asked_for(environment) == variable


def test_off_is_the_plain_tracer() -> None:
    with open_tracer("hapi-train", {}, enabled=False) as tracer:
        assert type(tracer) is Tracer and not tracer.enabled


def test_without_the_packages_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with caplog.at_level(logging.WARNING):
        assert open_telemetry("hapi-server", ENDPOINT) is None
    assert "pip install 'hapi-split[otel]'" in caplog.text


def test_an_unknown_exporter_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"OTEL_TRACES_EXPORTER: zipkn is not installed; there are: .*console"
    ):
        open_telemetry("hapi-server", {"OTEL_TRACES_EXPORTER": "zipkn"})


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exported.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_child_of_its_client_and_has_its_stages(
    telemetry: Telemetry, exported: InMemorySpanExporter
) -> None:
    facts = {
        "method": "POST", "status": 200, "traceparent": PARENT, "tenant": "vision", "model": "resnet18",
        "stages": {"read": 0.2, "forward": 0.5},
    }  # fmt: skip
    telemetry.answered("/v1/extract", 2.0, facts, {"read": time.monotonic() - 1.5})
    found = by_name(exported)
    assert set(found) == {"POST /v1/extract", "read", "forward"}
    request = found["POST /v1/extract"]
    assert request.kind is SpanKind.SERVER and seconds(request) == pytest.approx(2, abs=1e-3)
    assert request.parent is not None and f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert request.attributes is not None and request.attributes["hapi.model"] == "resnet18"
    for stage, length in (("read", 0.2), ("forward", 0.5)):
        child = found[stage]
        assert child.parent is not None and request.context is not None
        assert child.parent.span_id == request.context.span_id
        assert f"{child.context.trace_id:032x}" == PARENT.split("-")[1]  # type: ignore[union-attr]
        assert seconds(child) == pytest.approx(length, abs=1e-3)
    assert found["read"].start_time - request.start_time == pytest.approx(0.5e9, abs=5e7)  # type: ignore[operator]


def test_a_failed_request_says_why(telemetry: Telemetry, exported: InMemorySpanExporter) -> None:
    telemetry.answered("/v1/extract", 0.1, {"method": "POST", "status": 502, "detail": "gone"}, {})
    (span,) = exported.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "gone"
    assert span.parent is None


def test_requests_of_a_batch_carry_their_span(telemetry: Telemetry, exported: InMemorySpanExporter) -> None:
    tracer = TelemetryTracer(telemetry, enabled=True, process="hapi-train")
    with tracer.span("request", "network", batch=3, samples=8):
        sent = TRACE_PARENT.get()
    with tracer.span("train step", "client", epoch=1, batch=3):
        assert TRACE_PARENT.get() == ""
    with tracer.span("decode", "decode", samples=8):
        assert TRACE_PARENT.get() == ""
    assert TRACE_PARENT.get() == ""
    found = by_name(exported)
    assert set(found) == {"request", "train step"}
    assert found["request"].kind is SpanKind.CLIENT and found["request"].context is not None
    assert sent.split("-")[2] == f"{found['request'].context.span_id:016x}"
    assert found["train step"].attributes == {"hapi.epoch": 1, "hapi.batch": 3}
    assert len([e for e in tracer.document()["traceEvents"] if e["ph"] == "X"]) == 3, "the file has all"
