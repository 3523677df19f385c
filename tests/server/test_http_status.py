"""``/v1/status``, ``/metrics`` and the page over real requests, and the documents that tell of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TENSORS,
    Known,
    ServedApplication,
    exchange,
    metric,
    request_bytes,
    served,
    until,
)

import hapi
from hapi.server.status import MEMORY_KINDS
from hapi.server.tenants.by_token import read_tenants
from hapi.wire.messages import STATUS_PATH
from hapi.wire.report import STAGES

ROOT = Path(hapi.__file__).parents[1]
TOKEN = {"Authorization": "Bearer a-long-secret"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedApplication]:
    with served(folder, device="cpu,cpu") as running:
        yield running


def status(server: ServedApplication, headers: dict[str, str] | None = None) -> Any:
    answer = exchange(server.port, "GET", STATUS_PATH, headers=headers)
    assert answer.status == 200 and answer.headers["Cache-Control"] == "no-store"
    return answer.json()


@contextmanager
def at_work(server: ServedApplication, known: Known, **headers: str) -> Iterator[None]:
    """A request whose client reads nothing, so that it stays at work."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(known.extract([n % 40 for n in range(4000)])).encode()
        sock.sendall(request_bytes(EXTRACT, body, X_Request_Id="slowreader1", **headers))
        until(
            lambda: any(r.context.progress.done for r in server.application.board.requests()),
            30,
            "its first batch",
        )
        yield
    server.idle()


def test_the_status_of_an_idle_server(folder: Path) -> None:
    with served(folder) as server:
        document = status(server)
        assert document["state"] == "serving" and document["server"] == server.service.id
        assert document["queue"] == {"running": 0, "slots": 4, "queued": 0, "max_queued": 128}
        assert document["running"] == [] == document["errors"]
        assert [t["name"] for t in document["tenants"]] == ["default"]
        assert document["settings"]["cos_batch"] is None and document["settings"]["batching"] == "auto"
        assert str(folder) not in json.dumps(document)
        server.application.draining = True
        assert status(server)["state"] == "draining"


@pytest.mark.slow
def test_what_runs_and_what_is_left_of_it(server: ServedApplication, known: Known) -> None:
    before = status(server)["tenants"][0]["served"]
    with at_work(server, known):
        document = status(server)
        (one,) = document["running"]
        wanted = {"id": "slowreader1", "tenant": "default", "kind": "extract", "model": "resnet18",
                  "dataset": "digits", "split": 4, "split_name": "maxpool", "cos_batch": 16, "total": 4000}  # fmt: skip
        assert wanted.items() <= one.items()
        assert 0 < one["done"] < 4000 and one["done"] % 16 == 0 and one["seconds"] > 0
        assert set(one["stages"]) <= set(STAGES)
        until(lambda: "send" in status(server)["running"][0]["stages"], 10, "the stage")
        device = next(d for d in document["devices"] if d["name"] == one["device"])
        assert device["requests"] == 1 and device["cos_batch"] == 16
        assert set(device["memory"]) == set(MEMORY_KINDS)
        assert device["memory"]["weights"] > 0 < device["memory"]["activations"]
        assert sum(device["memory"].values()) <= device["budget_bytes"]
        assert document["queue"]["running"] == 1 == document["tenants"][0]["running"]
    document = status(server)
    assert document["running"] == [] and server.application.board.requests() == []
    assert all(d["memory"]["activations"] == 0 == d["requests"] for d in document["devices"])
    assert document["tenants"][0]["served"] == before
    exchange(server.port, "POST", EXTRACT, known.extract())
    exchange(server.port, "POST", SAMPLES, known.samples())
    exchange(server.port, "POST", TENSORS, known.tensors())
    until(lambda: status(server)["tenants"][0]["served"] == before + 3, 10, "the count of the last answer")


def test_an_error_is_in_the_list_with_the_id_that_the_client_has(
    server: ServedApplication, known: Known
) -> None:
    for given, expected in (("mine42", "mine42"), ("<b>", None), ("", None), ("²²", None)):
        answer = exchange(
            server.port,
            "POST",
            EXTRACT,
            known.extract() | {"split": 99},
            {"X-Request-Id": given.encode("latin-1")},  # type: ignore[dict-item]
        )
        given_back = answer.headers["X-Request-Id"]
        until(lambda i=given_back: status(server)["errors"][:1] and status(server)["errors"][0]["request_id"] == i,
              10, "the error")  # fmt: skip
        newest = status(server)["errors"][0]
        if expected is not None:
            assert newest["request_id"] == expected
        else:
            assert re.fullmatch("[0-9a-f]{16}", newest["request_id"])
        assert newest["status"] == 422 and newest["kind"] == "unprocessable" and newest["path"] == EXTRACT
        assert newest["line"] == answer.json()["detail"] and newest["tenant"] == "default"


def test_the_status_wants_a_token_and_the_page_does_not(folder: Path) -> None:
    with served(folder, token="a-long-secret") as server:
        assert exchange(server.port, "GET", STATUS_PATH).status == 401
        assert status(server, TOKEN)["errors"] == []
        page = exchange(server.port, "GET", "/")
        assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert exchange(server.port, "GET", "//").status == 401


def test_the_page_may_run_nothing_but_itself(server: ServedApplication) -> None:
    answer = exchange(server.port, "GET", "/")
    policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>".encode(), answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    text = answer.body.decode()
    assert not re.search(r"""https?://|(?:src|href)=["'](?!data:,)""", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bon\w+=|style=", text)


@pytest.mark.slow
def test_thousands_of_tenants_are_not_all_shown(folder: Path, tmp_path: Path, known: Known) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("".join(f"t{n:04}: {{token: secret-{n:04}}}\n" for n in range(3000)))
    with served(folder, tenants=read_tenants(str(path), None)) as server:
        headers = {"Authorization": "Bearer secret-2999"}
        assert exchange(server.port, "POST", SAMPLES, known.samples(), headers).status == 200
        server.idle()
        document = status(server, headers)
        assert len(document["tenants"]) == 100 and document["tenants_in_all"] == 3000
        assert document["tenants"][0]["name"] == "t2999" and document["tenants"][0]["served"] == 1


# -- metrics -------------------------------------------------------------------------------------------------


def families(server: ServedApplication) -> dict[str, Any]:
    """Metrics by the name that a query uses, from the text itself."""
    text = exchange(server.port, "GET", "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in found, f"{name} is printed twice"
        found[name] = family
    return found


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of each metric in the table of deploy/prometheus/README.md."""
    text = (ROOT / "deploy" / "prometheus" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    table = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(table) == len(rows), "a metric stands twice in deploy/prometheus/README.md"
    return table


def test_the_table_of_metrics_is_what_the_server_prints(server: ServedApplication, known: Known) -> None:
    assert exchange(server.port, "POST", EXTRACT, known.extract()).status == 200
    printed = {}
    for name, family in families(server).items():
        if family.name.startswith("process_"):
            continue  # of the client library
        names = {tuple(n for n in sample.labels if n != "le") for sample in family.samples}
        printed[name] = (family.type, *names)
    table = documented()
    assert set(table) == set(printed), "deploy/prometheus/README.md has other metrics than /metrics"
    for name, (kind, labels) in table.items():
        assert printed[name][0] == kind, name
        assert all(sorted(got) == sorted(labels) for got in printed[name][1:]), (name, printed[name], labels)


def test_names_follow_the_conventions(server: ServedApplication) -> None:
    for name, family in families(server).items():
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|milliseconds|mb|mib|kb|percent)(_|$)", name), name
        assert family.documentation.endswith("."), name


def test_counts_agree_with_each_other(folder: Path, known: Known) -> None:
    with served(folder, device="cpu,cpu") as server:
        for number in range(5):
            assert (
                exchange(server.port, "POST", EXTRACT, known.extract(list(range(20 + number)))).status == 200
            )
        assert exchange(server.port, "POST", EXTRACT, known.extract() | {"split": 99}).status == 422
        server.idle()
        port = server.port
        assert metric(port, "hapi_tenant_served_total") == 5 == metric(port, "hapi_cos_batch_samples_count")
        assert metric(port, "hapi_cos_batch_samples_sum") == 5 * 16
        assert metric(port, "hapi_samples_total") == sum(range(20, 25))
        assert metric(port, "hapi_sent_bytes_total") == metric(port, "hapi_tenant_sent_bytes_total")
        loads = metric(port, "hapi_model_cache_misses_total")
        assert loads in (1, 2) and metric(port, "hapi_model_cache_hits_total") == 5 - loads
        assert metric(port, "hapi_errors_total") == 1
        found = families(server)
        names = {s.labels["device"] for s in found["hapi_cos_batch_samples"].samples}
        assert names == {"cpu#0", "cpu#1"}
        kinds = {s.labels["kind"] for s in found["hapi_device_memory_bytes"].samples}
        assert kinds == set(MEMORY_KINDS)
        stages = {s.labels["stage"]: s.value for s in found["hapi_stage_seconds_total"].samples}
        assert tuple(stages) == STAGES and min(stages[s] for s in ("read", "decode", "forward", "send")) > 0
        assert metric(port, "hapi_device_memory_bytes") == metric(port, "hapi_model_cache_bytes") > 0


def test_metrics_are_not_read_on_the_event_loop(
    server: ServedApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    devices = server.service.devices

    def watched() -> Any:
        seen.append(threading.current_thread().name)
        return devices()

    monkeypatch.setattr(server.service, "devices", watched)
    status(server)
    metric(server.port, "hapi_slots")
    assert len(seen) == 2 and all(name.startswith("hapi-look") for name in seen)


def test_errors_without_a_token_and_of_health_checks_push_out_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(folder, token="a-long-secret") as server:
        assert exchange(server.port, "GET", "/v1/datasets/none", headers=TOKEN).status == 404
        monkeypatch.setattr(server.service.watch, "stuck", lambda: "nothing has moved")
        for _ in range(60):
            assert exchange(server.port, "POST", "/").status == 405
            assert exchange(server.port, "GET", "/readyz").status == 503
        errors = exchange(server.port, "GET", STATUS_PATH, headers=TOKEN).json()["errors"]
    assert [error["status"] for error in errors] == [404]
