"""Several tenants over real requests: one that asks for much, one that asks for little, deadlines, and the metrics."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    Answer,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    served,
    until,
)
from support.waiting import PATIENCE

from hapi.errors import BadRequestError
from hapi.models.graph.layers import Segment
from hapi.server.http import bodies
from hapi.server.tenants.by_token import Tenants, read_tenants
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.messages import DEADLINE_HEADER, STATUS_PATH
from hapi.wire.report import RequestReport

FILE = """
heavy: {token: heavy-secret}
light: {token: light-secret}
rationed: {token: rationed-secret, in_flight: 1, bytes_per_second: 200KiB}
"""
IDS = list(range(40))


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(FILE)
    return read_tenants(str(path), None)


def as_tenant(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-secret", **more}


def by_tenant(server: ServedApplication, name: str, **labels: str) -> float:
    text = exchange(server.port, "GET", "/metrics", headers=as_tenant("light")).body.decode()
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} with {labels}")


def report_of(answer: Answer) -> RequestReport:
    reader = FrameReader(BufferSource(iter([answer.body])))
    while not isinstance(
        header := reader.next(lambda h: [bytearray(t.nbytes) for t in h.tensors]), StreamEnd
    ):  # type: ignore[misc]
        pass
    return RequestReport.from_json(header.report)


@contextmanager
def crowded(server: ServedApplication, known: Known, clients: int) -> Iterator[list[int]]:
    """``clients`` that ask as the heavy tenant without a pause; the statuses of what they got."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("heavy"))
            statuses.append(answer.status)
            if answer.status == 429:
                stop.wait(0.05)  # impolite: far sooner than it was told to

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join(240)


@contextmanager
def held_up() -> Iterator[None]:
    """Forward passes wait until the end of the block."""
    release, forward = threading.Event(), Segment.forward

    def gated(self: Segment, x: Any) -> Any:
        release.wait(240)
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "forward", gated)
        try:
            yield
        finally:
            release.set()


@pytest.mark.slow
def test_a_light_tenant_in_a_crowd(folder: Path, known: Known, tenants: Tenants) -> None:
    """Its requests go next, and none of them is sent away, although the queue is full all the time."""
    with served(folder, tenants=tenants, max_running=1, max_queued=8, cos_batch=8, threads=1) as server:
        exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("light"))
        with crowded(server, known, 14) as statuses:
            until(lambda: statuses.count(429) >= 10 and statuses.count(200) >= 4, 30, "a full queue")
            before, waits, ahead = len(statuses), [], []
            for _ in range(6):
                served_before = statuses.count(200)
                answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("light"))
                ahead.append(statuses.count(200) - served_before)
                assert answer.status == 200
                known.check_features(answer.body, IDS)
                waits.append(report_of(answer).seconds["queue"])
            assert statuses[before:].count(200) >= 3, "the others go on"
        server.idle()  # a request is accounted for after its client has all of it
        # Behind the one that runs, at most; a client thread may be late to count what it got.
        assert sorted(ahead)[3] <= 3, ahead
        assert by_tenant(server, "hapi_tenant_served_total", tenant="light") == 7
        assert by_tenant(server, "hapi_tenant_shed_total", tenant="light", reason="full") == 0
        assert by_tenant(server, "hapi_tenant_shed_total", tenant="heavy", reason="full") == statuses.count(
            429
        )
        assert by_tenant(server, "hapi_tenant_served_total", tenant="heavy") == statuses.count(200)
        assert set(statuses) == {200, 429}
        assert by_tenant(server, "hapi_tenant_cost_seconds_total", tenant="heavy") > 0
        assert by_tenant(server, "hapi_tenant_queued", tenant="heavy") == 0


@pytest.mark.slow
def test_what_is_said_about_waiting_comes_true(folder: Path, known: Known, tenants: Tenants) -> None:
    with served(folder, tenants=tenants, max_running=2, max_queued=64, cos_batch=8, threads=1) as server:
        with crowded(server, known, 8) as statuses:
            until(lambda: len(statuses) >= 30, 60, "enough answers to judge by")

            def comes_true() -> bool:
                """Whether waits were as long as was said; what else this machine does may make some longer."""
                pairs = []
                for _ in range(5):
                    expected = by_tenant(server, "hapi_tenant_expected_wait_seconds", tenant="heavy")
                    answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("heavy"))
                    pairs.append((expected, report_of(answer).seconds["queue"]))
                assert report_of(answer).wait > 0
                expected, waited = (sum(values) for values in zip(*pairs, strict=True))
                return expected / 3 < waited < expected * 3

            until(comes_true, 60, "waits as long as was said")
        server.idle()
        answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("heavy"))
        assert report_of(answer).wait == 0, "alone there is nothing to wait for"


def test_deadlines(folder: Path, known: Known, tenants: Tenants) -> None:
    with served(folder, tenants=tenants, max_running=1, max_queued=64, cos_batch=1, threads=1) as server:

        def ask(name: str, ids: list[int], deadline: str) -> Answer:
            headers = as_tenant(name, **{DEADLINE_HEADER: deadline})
            return exchange(server.port, "POST", EXTRACT, known.extract(ids), headers)

        assert ask("heavy", [1, 2], "30").status == 200
        with ThreadPoolExecutor(1) as background:
            with held_up():
                long = background.submit(ask, "heavy", IDS, "86400")
                until(
                    lambda: by_tenant(server, "hapi_tenant_running", tenant="heavy") == 1,
                    30,
                    "the long request",
                )
                answer = ask("heavy", [3], "0.3")  # another tenant's would have the extra slot
                detail = check_problem(answer, 504, "deadline of 0.")
                assert answer.json()["type"].endswith(":deadline") and "Retry-After" in answer.headers, detail
                assert by_tenant(server, "hapi_tenant_queued", tenant="heavy") == 0
                assert by_tenant(server, "hapi_tenant_shed_total", tenant="heavy", reason="expired") == 1
            assert long.result().status == 200
        for wrong in ("0", "-1", "nan", "inf", "1e3", "", "86401", "1,5", " ", "9" * 400, "abc"):
            check_problem(ask("light", [3], wrong), 400, DEADLINE_HEADER)
        check_problem(
            exchange(
                server.port, "GET", "/v1/datasets", headers=as_tenant("light", **{DEADLINE_HEADER: "x"})
            ),
            400,
        )


@pytest.mark.slow
def test_a_rationed_tenant(folder: Path, known: Known, tenants: Tenants) -> None:
    """40 samples of 16 KiB are 640 KiB of features: with 200 KiB/s the third one ends after 5 s at the earliest."""
    with served(folder, tenants=tenants, max_running=4, cos_batch=8) as server:
        exchange(server.port, "POST", EXTRACT, known.extract(IDS[:2]), as_tenant("light"))
        started = time.monotonic()
        ends = []

        def ask(_: int) -> int:
            answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("rationed"))
            ends.append(time.monotonic() - started)
            return answer.status

        with ThreadPoolExecutor(3) as clients:
            asked = clients.map(ask, range(3))
            until(
                lambda: (
                    len(ends) == 3
                    or by_tenant(server, "hapi_tenant_expected_wait_seconds", tenant="rationed") > 1
                ),
                20,
                "an answer that has to be paid off",
            )
            assert by_tenant(server, "hapi_tenant_running", tenant="rationed") <= 1
            light = exchange(server.port, "POST", EXTRACT, known.extract(IDS), as_tenant("light"))
            assert light.status == 200
            # The rationed ones may be over where this machine stood still, but not before their time.
            assert len(ends) < 3 or time.monotonic() - started > 5.0, "others are not rationed"
            assert list(asked) == [200] * 3
        assert max(ends) > 5.0
        server.idle()  # a request is accounted for after its client has all of it
        assert by_tenant(server, "hapi_tenant_sent_bytes_total", tenant="rationed") > 3 * 640 * 1024


def test_what_is_malformed_does_not_wait(folder: Path, known: Known, tenants: Tenants) -> None:
    with served(folder, tenants=tenants, max_running=1, max_queued=0, cos_batch=1, threads=1) as server:
        headers = as_tenant("light")
        with ThreadPoolExecutor(1) as background:
            with held_up():
                document, heavy = known.extract(IDS), as_tenant("heavy")
                long = background.submit(exchange, server.port, "POST", EXTRACT, document, heavy)
                until(
                    lambda: by_tenant(server, "hapi_tenant_running", tenant="heavy") == 1,
                    30,
                    "the long request",
                )
                check_problem(exchange(server.port, "POST", EXTRACT, {"ids": []}, headers), 400)
                full = exchange(server.port, "POST", SAMPLES, known.samples(), headers)
                check_problem(full, 429, "come back")
                assert full.json()["retry_after"] >= full.json()["expected_wait"] > 0
            assert long.result().status == 200
        server.idle()
        assert exchange(server.port, "POST", SAMPLES, known.samples(), headers).status == 200
        check_problem(exchange(server.port, "POST", SAMPLES, known.samples(), as_tenant("nobody")), 401)


def test_slow_bodies_of_one_tenant(
    folder: Path, known: Known, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES", 4)
    with served(folder, tenants=tenants) as small:
        head = (
            f"POST {EXTRACT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            "Authorization: Bearer heavy-secret\r\n\r\n"
        )
        socks = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(4)]
        for sock in socks:
            sock.sendall(head.encode())
        until(lambda: small.application.bodies.count == 2, 5, "half of the bodies")
        heavy = exchange(small.port, "POST", EXTRACT, known.extract(), as_tenant("heavy"))
        check_problem(heavy, 429, "are arriving")
        assert exchange(small.port, "POST", EXTRACT, known.extract(), as_tenant("light")).status == 200
        for sock in socks:
            sock.close()
        until(lambda: small.application.bodies.count == 0, 5, "the end of the bodies")
        known.check_features(
            exchange(small.port, "POST", EXTRACT, known.extract(), as_tenant("heavy")).body, [3, 39, 0, 17]
        )


@pytest.mark.parametrize("what", ["body", "metrics", "status"])
def test_costly_bodies_and_looks_of_one_delay_no_other(
    folder: Path, tenants: Tenants, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, what: str
) -> None:
    """Before a request has a slot: at the parser, and at the thread that looks at the server."""
    begun: list[str] = []

    def wait(name: str) -> None:
        begun.append(name)
        gate.wait(PATIENCE)

    def parse(path: str, body: bytes) -> Any:
        wait(body.decode())
        raise BadRequestError("no request")

    def look(*seen: Any) -> Any:
        wait(seen[-1].name)
        return b"{}"

    with served(folder, tenants=tenants) as server, ThreadPoolExecutor(41) as clients:
        application = server.application
        monkeypatch.setattr(server.service, "request", parse)
        monkeypatch.setattr(application.metrics, "render", look)
        monkeypatch.setattr(application.overview, "document", look if what == "status" else None)
        turns = application.bodies.parsing if what == "body" else application.looks.admission
        asked = {"body": ("POST", EXTRACT), "metrics": ("GET", "/metrics"), "status": ("GET", STATUS_PATH)}[
            what
        ]

        def ask(name: str) -> Future[Answer]:
            body = name.encode() if what == "body" else None
            return clients.submit(exchange, server.port, *asked, body, as_tenant(name))

        def waits(name: str) -> int:
            return sum(turns.of(next(t for t in tenants.all if t.name == name)))

        answers = [ask("heavy") for _ in range(40)]
        try:
            until(lambda: waits("heavy") == 40, 20, "forty of one")
            answers.append(ask("light"))
            until(lambda: waits("light") == 1, 20, "the one of another")
        finally:
            gate.set()
        assert {answer.result(PATIENCE).status for answer in answers} <= {200, 400, 500}
    assert len(begun) == 41 and begun.index("light") <= 2
