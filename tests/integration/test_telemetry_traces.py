"""hapi-server and hapi-train with OpenTelemetry's environment: a request is one trace over both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.harness import DIGITS_JOB, losses, report_of, server, train
from support.http_tools import make_store

pytestmark = pytest.mark.slow
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits", "--epochs", "2",
)  # fmt: skip


class Collector:
    """Receives spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """Each span with the name of its service."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, path: str, request: ExportTraceServiceRequest) -> None:
        assert path == "/v1/traces"
        for of_resource in request.resource_spans:
            facts = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [(facts["service.name"], span) for span in scope.spans]

    def of(self, service: str, name: str) -> list[Span]:
        return [span for owner, span in self.spans if owner == service and span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def test_a_request_is_one_trace_over_both_tiers(collector: Collector, tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    reports = [tmp_path / name for name in ("with.json", "without.json")]
    with server(folder, "--cos-batch", "5", **collector.environment) as running:
        job = (*JOB, "--server", running.url, "--report")
        train(*job, str(reports[0]), **collector.environment)
        train(*job, str(reports[1]))
        assert running.stop() == 0, "what is left is sent at the end"
    assert losses(report_of(reports[0])) == losses(report_of(reports[1]))
    requests = {span.span_id: span for span in collector.of("hapi-train", "request")}
    answers = [s for s in collector.of("hapi-server", "POST /v1/extract") if s.parent_span_id in requests]
    assert len(requests) == 2 * 40 / 5 == len(answers), "those of the second job have no parent"
    assert len(collector.of("hapi-server", "POST /v1/extract")) == 2 * len(answers)
    for answer in answers:
        asked = requests[answer.parent_span_id]
        assert answer.trace_id == asked.trace_id
        stages = {span.name for _, span in collector.spans if span.parent_span_id == answer.span_id}
        assert {"read", "decode", "forward", "send"} <= stages
    steps = collector.of("hapi-train", "train step")
    numbers = [{a.key: a.value.int_value for a in step.attributes} for step in steps]
    assert sorted((n["hapi.epoch"], n["hapi.batch"]) for n in numbers) == [(0, 0), (0, 1), (1, 0), (1, 1)]
