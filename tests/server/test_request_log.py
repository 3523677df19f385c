"""What a request's line in the log names, and the trace that it belongs to."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.harness import server as running_server
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TENSORS,
    Known,
    ServedApplication,
    exchange,
    request_bytes,
    until,
)

from hapi.wire.messages import REQUEST_ID_HEADER, TRACE_HEADER
from hapi.wire.warm_up import WARM_PATH

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LATER = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what.comes:later"


@pytest.mark.parametrize(
    "path", ["/healthz", "/v1", "/v1/datasets/nosuch", "/v1/openapi.json", "/nosuch", "/"]
)
@pytest.mark.parametrize("trace", [TRACE, LATER])
def test_a_trace_is_answered(server: ServedApplication, path: str, trace: str) -> None:
    assert exchange(server.port, "GET", path, headers={TRACE_HEADER: trace}).headers[TRACE_HEADER] == trace


@pytest.mark.parametrize(
    "wrong",
    ["", "x", TRACE.upper(), TRACE + "-more", TRACE[:-1], TRACE.replace("00-4", "ff-4"), "é" * 55,
     "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
     LATER + "x" * 300, LATER + " x"],
)  # fmt: skip
def test_what_is_no_trace_is_ignored(server: ServedApplication, wrong: str) -> None:
    answer = exchange(server.port, "GET", "/v1", headers={TRACE_HEADER: wrong.encode().decode("latin-1")})
    found = answer.headers.get(TRACE_HEADER)
    assert answer.status == 200 and found is None


def test_blanks_after_a_trace_are_none_of_it(server: ServedApplication) -> None:
    answer = exchange(server.port, "GET", "/v1", headers={TRACE_HEADER: f"{TRACE} "})
    assert answer.headers[TRACE_HEADER] == TRACE


def test_two_traces_are_none(server: ServedApplication) -> None:
    data = request_bytes("/v1", b"", "GET", Connection="close", traceparent=TRACE)
    twice = data.replace(b"traceparent", b"Traceparent: " + TRACE.encode() + b"\r\ntraceparent", 1)
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(twice)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200") and b"traceparent" not in answer.lower()


@pytest.mark.slow
def test_lines_name_what_requests_name(folder: Path, known: Known, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model, split = known.extract()["model"], {"split": 4, "split_name": known.extract()["split_name"]}
    absent = {"name": "nosuch", "version": known.dataset.version}
    features = {"dataset": "digits", "model": "resnet18", "split": 4}
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        (EXTRACT, known.extract(job="6f1e"), {**features, "job": "6f1e", "status": 200, "samples": 4}),
        (EXTRACT, known.extract(), {**features, "status": 200}),
        (EXTRACT, known.extract(dataset=absent), {**features, "dataset": "nosuch", "status": 404}),
        (SAMPLES, {**known.samples(), "job": "7a"}, {"dataset": "digits", "job": "7a", "status": 200}),
        (TENSORS, known.tensors(), {"model": "pushed", "status": 200}),
        (WARM_PATH, {"model": model, **split}, {"model": "resnet18", "split": 4, "status": 200}),
        (EXTRACT, {}, {"status": 400}),
    ]
    own = {"dataset", "model", "split", "job", TRACE_HEADER}
    with running_server(folder, log=log) as running:
        for number, (path, body, _) in enumerate(asked):
            headers = {REQUEST_ID_HEADER: f"id{number}", **({TRACE_HEADER: TRACE} if number % 2 else {})}
            answer = exchange(running.port, "POST", path, body, headers)
            assert answer.headers.get(TRACE_HEADER) == headers.get(TRACE_HEADER)
        until(lambda: len(lines_of(log)) == len(asked), 20, "a line for each request")
    for number, (path, _, expected) in enumerate(asked):
        line = lines_of(log)[f"id{number}"]
        expected = {**expected, "path": path, **({TRACE_HEADER: TRACE} if number % 2 else {})}
        assert {k: line.get(k) for k in expected} == expected
        assert own & set(line) == own & set(expected)


def lines_of(log: Path) -> dict[str, dict[str, Any]]:
    """The lines of requests, by their ids."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {line["request_id"]: line for line in lines if line.get("event") == "request"}
