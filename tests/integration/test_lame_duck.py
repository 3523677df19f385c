"""The end of a server behind a balancer: it looks unwell before its port closes, and nothing is cut off."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from pathlib import Path

import pytest
from support.harness import server
from support.http_tools import EXTRACT, Answer, Known, check_problem, exchange, make_store, metric, until

pytestmark = pytest.mark.slow

SECONDS = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


def events(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["event"] for line in lines]


def is_closed(port: int) -> bool:
    try:
        exchange(port, "GET", "/healthz")
    except ConnectionRefusedError:
        return True
    return False


def test_it_takes_work_while_it_looks_unwell(folder: Path, tmp_path: Path) -> None:
    known, log = Known(folder), tmp_path / "log"
    with server(folder, "--lame-duck", "1h", log=log) as running:
        running.process.send_signal(signal.SIGTERM)
        until(lambda: exchange(running.port, "GET", "/readyz").status == 503, 20, "a lame duck")
        assert exchange(running.port, "GET", "/v1/status").json()["state"] == "lame-duck"
        assert exchange(running.port, "GET", "/healthz").status == 200
        known.check_features(exchange(running.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        assert "draining" not in events(log)


def test_then_its_port_closes_and_nothing_is_cut_off(folder: Path, tmp_path: Path) -> None:
    known, log, ids = Known(folder), tmp_path / "log", [n % 40 for n in range(1200)]
    patient = ("--drain-seconds", "600", "--send-timeout", "1h", "--slow-reader-rate", "0")
    with server(folder, "--lame-duck", f"{SECONDS:g}s", *patient, log=log) as running:
        unread = http.client.HTTPConnection("127.0.0.1", running.port, timeout=240)
        unread.request("POST", EXTRACT, json.dumps(known.extract(ids)).encode())
        until(lambda: metric(running.port, "hapi_requests_running") == 1, 20, "the long request")
        kept = http.client.HTTPConnection("127.0.0.1", running.port, timeout=240)
        kept.request("GET", "/v1")
        kept.getresponse().read()
        told = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        until(lambda: is_closed(running.port), 30, "the end of the port")
        assert time.monotonic() - told >= SECONDS
        kept.request("POST", EXTRACT, json.dumps(known.extract()).encode())
        response = kept.getresponse()
        assert response.status == 503 and b"another" in response.read()
        response = unread.getresponse()
        known.check_features(response.read(), ids)
        assert running.process.wait(240) == 0
        for connection in (kept, unread):
            connection.close()
    lifecycle = [e for e in events(log) if e in ("lame duck", "draining", "stopped")]
    assert lifecycle == ["lame duck", "draining", "stopped"]


def test_a_second_signal_ends_it_at_once(folder: Path, tmp_path: Path) -> None:
    with server(folder, "--lame-duck", "1h", log=tmp_path / "log") as running:
        running.process.send_signal(signal.SIGTERM)
        until(lambda: exchange(running.port, "GET", "/readyz").status == 503, 20, "a lame duck")
        check_problem(exchange(running.port, "GET", "/readyz"), 503, "shutting down")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(240) == 0


def test_a_request_that_a_limit_holds_back_is_sent_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Nothing runs, so the drain is over at once; what waits is told so, and not cut off."""
    known, tenants, found = Known(folder), tmp_path / "tenants.yaml", list[Answer]()
    tenants.write_text(
        "slow: {token: slow-secret, bytes_per_second: 1}\noperators: {token: operators-secret}\n"
    )
    slow, operators = ({"Authorization": f"Bearer {name}-secret"} for name in ("slow", "operators"))
    with server(folder, "--tenants", str(tenants), log=tmp_path / "log") as running:
        assert exchange(running.port, "POST", EXTRACT, known.extract(), slow).status == 200
        waits = threading.Thread(
            target=lambda: found.append(exchange(running.port, "POST", EXTRACT, known.extract(), slow))
        )
        waits.start()
        queue = lambda: exchange(running.port, "GET", "/v1/status", None, operators).json()["queue"]  # noqa: E731
        until(lambda: queue()["queued"] == 1 and queue()["running"] == 0, 60, "a request that waits")
        running.process.send_signal(signal.SIGTERM)
        waits.join(240)
        check_problem(found[0], 503, "shutting down; ask another one")
        assert running.process.wait(240) == 0
