"""The server's account: what a request cost, what others' cost meanwhile, and layers that were timed."""

from __future__ import annotations

import gc
import json
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    SPLIT,
    TENSORS,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    served,
)
from support.threads import at_once

from hapi.errors import BadRequestError
from hapi.server.account import Account
from hapi.server.context import RequestClock, RequestContext
from hapi.server.http.loopback import loopback_handler
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.report import STAGES, RequestReport


def account(device: str = "cpu") -> Account:
    return Account("server", torch.device(device), running=3, reuse=True)


def of(clock: RequestClock) -> RequestContext:
    return RequestContext(clock=clock)


def delta(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


# -- whose work it was ---------------------------------------------------------------------------------------------


def test_own_work_and_that_of_others() -> None:
    a = account()
    mine = a.clock("mine")
    begun = a.marks(mine)
    mine.add("forward", 1.0, 0.5)
    a.clock("other").add("decode", 9.0, 2.0)
    a.clock("third").add("send", 9.0, 1.0)
    a.clock("mine").add("forward", 1.0, 0.25)  # another request of the same job
    report = a.report(begun, of(mine), 16, (0.5, 0.25))
    assert delta(report.work) == pytest.approx(3.75) and delta(report.others) == pytest.approx(3.0)
    assert (report.cpu["forward"], report.seconds["forward"]) == (0.5, 1.0)
    assert set(report.cpu) == set(STAGES)
    assert (report.cos_batch, report.layers, report.server) == (16, (0.5, 0.25), "server")
    assert report.tier.running == 3 and report.tier.threads == torch.get_num_threads()
    assert delta(report.clock) >= 0 and delta(report.process) >= 0


def test_the_seconds_of_other_processes_are_the_servers_own() -> None:
    spent = [5.0]
    a = Account("server", torch.device("cpu"), running=1, reuse=True, elsewhere=lambda: spent[0])
    mine = a.clock("mine")
    begun = a.marks(mine)
    spent[0] += 100.0
    assert 100.0 <= delta(a.report(begun, of(mine)).process) < 110.0


def test_a_job_alone_has_no_others() -> None:
    a = account()
    a.clock("before").add("forward", 5.0, 5.0)
    mine = a.clock("mine")
    begun = a.marks(mine)
    mine.add("forward", 1.0, 0.5)
    assert delta(a.report(begun, of(mine)).others) == pytest.approx(0.0)


def test_a_request_of_nobody_known_cannot_tell_others_apart() -> None:
    a = account()
    nobody = a.clock("")
    begun = a.marks(nobody)
    nobody.add("read", 1.0, 0.5)
    a.clock("other").add("read", 1.0, 0.5)
    report = a.report(begun, of(nobody))
    assert delta(report.work) == pytest.approx(1.0) and report.others == (0.0, 0.0)
    mine = a.clock("mine")
    begun = a.marks(mine)
    a.clock("").add("read", 1.0, 0.5)
    assert delta(a.report(begun, of(mine)).others) == pytest.approx(0.5), "it is an other to the others"


def test_however_many_jobs_are_at_work_none_is_taken_for_another() -> None:
    a = account()
    clocks = [(a.clock(f"job{i}"), a.clock(f"job{i}")) for i in range(3000)]
    begun = [a.marks(first) for first, _ in clocks]
    for first, second in clocks:
        first.add("forward", 1.0, 0.75)
        second.add("forward", 1.0, 0.25)
    for marks, (first, _) in zip(begun, clocks, strict=True):
        report = a.report(marks, of(first))
        assert delta(report.work) == pytest.approx(3000) and delta(report.others) == pytest.approx(2999)


def test_a_job_is_remembered_while_a_request_of_it_is_under_way() -> None:
    a = account()
    first = a.clock("mine")
    begun = a.marks(first)
    second = a.clock("mine")
    second.add("forward", 1.0, 1.0)
    del second
    assert delta(a.report(begun, of(first)).others) == pytest.approx(0.0)
    for i in range(100):
        a.clock(f"job{i}").add("read", 1.0, 1.0)
    gc.collect()
    assert list(a._jobs) == ["mine"], "there is no work under way of the others"
    del first
    gc.collect()
    again = a.clock("mine")
    begun = a.marks(again)
    again.add("forward", 1.0, 1.0)
    a.clock("other").add("forward", 1.0, 0.5)
    assert delta(a.report(begun, of(again)).others) == pytest.approx(0.5)


def test_on_a_gpu_forward_passes_count_by_the_wall() -> None:
    a = account("cuda")
    mine = a.clock("mine")
    begun = a.marks(mine)
    mine.add("forward", 2.0, 0.1)
    mine.add("decode", 5.0, 5.0)
    report = a.report(begun, of(mine))
    assert delta(report.work) == pytest.approx(2.0) and report.process == (0.0, 0.0)


def test_stages_take_cpu_seconds_of_their_thread() -> None:
    a = account()
    clock = a.clock("mine")
    with clock.stage("read"):
        time.sleep(0.03)
    with clock.stage("decode"):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
    assert clock.seconds()["read"] >= 0.03 > clock.cpu_seconds()["read"]
    assert clock.cpu_seconds()["decode"] >= 0.02


def test_many_threads_lose_nothing() -> None:
    a = account()

    def work(job: str) -> None:
        for _ in range(300):
            clock = a.clock(job)
            clock.add("forward", 0.5, 0.25)
            a.marks(clock)

    held = a.clock("j0"), a.clock("j1")
    at_once(6, lambda number: work(f"j{number % 2}"))
    marks = a.marks(held[0])
    assert marks.work == pytest.approx(6 * 300 * 0.25) and marks.others == pytest.approx(3 * 300 * 0.25)


# -- over the wire -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedApplication]:
    with served(folder, cos_batch=3, threads=1) as application:
        yield application


def answered(
    server: ServedApplication, path: str, document: Any, way: str
) -> tuple[np.ndarray, RequestReport]:
    """The first tensor of all frames, and the report."""
    if way == "http":
        answer = exchange(server.port, "POST", path, document)
        assert answer.status == 200, answer.body
        body = answer.body
    else:
        status, _, buffers = loopback_handler(server.service)("POST", path, json.dumps(document).encode())
        assert status == 200
        body = b"".join(bytes(b) for b in buffers)
    reader, parts = FrameReader(BufferSource(iter([body]))), []

    def sink(header: Any) -> list[memoryview]:
        arrays = [np.empty(t.nbytes, np.uint8) for t in header.tensors]
        parts.append(arrays[0])
        return [array.data for array in arrays]

    while not isinstance(header := reader.next(sink), StreamEnd):
        pass
    return np.concatenate(parts), RequestReport.from_json(header.report)


@pytest.mark.parametrize("way", ["http", "loopback"])
def test_layers_are_timed_when_asked(server: ServedApplication, known: Known, way: str) -> None:
    ids = list(range(10))
    plain, report = answered(server, EXTRACT, known.extract(ids), way)
    assert report.layers == ()
    timed, report = answered(server, EXTRACT, known.extract(ids, time_layers=True), way)
    np.testing.assert_array_equal(timed, plain)
    assert len(report.layers) == SPLIT and all(seconds > 0 for seconds in report.layers)
    assert sum(report.layers) <= report.seconds["forward"] * 1.05 + 0.01
    again, report = answered(server, EXTRACT, known.extract(ids, time_layers=False), way)
    assert report.layers == () and report.cos_batch == 3
    np.testing.assert_array_equal(again, plain)


def test_new_memory_of_forward_passes_is_told() -> None:
    a, size = account(), 16 << 20
    clock = a.clock("mine")
    with clock.stage("read"), mmap.mmap(-1, size) as new:
        new[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    assert a.report(a.marks(clock), of(clock)).pages == 0, "another stage's"
    with clock.stage("forward"), mmap.mmap(-1, size) as new:
        new[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    assert a.report(a.marks(clock), of(clock)).pages >= size // (2 << 20), "a page may be a huge one"


@pytest.mark.parametrize("way", ["http", "loopback"])
def test_when_the_first_frame_was_made(server: ServedApplication, known: Known, way: str) -> None:
    _, one = answered(server, EXTRACT, known.extract([1, 2, 3]), way)
    assert one.cos_batch == 3, "one frame: all that is done before it is sent"
    seconds = one.seconds
    parts = ("queue", "model", "device_wait", "forward")
    assert max(seconds[part] for part in parts) <= one.first <= sum(seconds.values()) + delta(one.clock)
    _, several = answered(server, EXTRACT, known.extract(list(range(40))), way)
    assert 0 < several.first < delta(several.clock) + several.seconds["queue"]
    _, stored = answered(server, SAMPLES, known.samples(), way)
    assert 0 < stored.first <= delta(stored.clock) + sum(stored.seconds.values()) + 1.0


def test_the_queue_counts_until_the_first_frame() -> None:
    account = Account("s", torch.device("cpu"), running=1, reuse=True)
    clock = account.clock("")
    context = RequestContext(clock=clock)
    assert account.report(account.marks(clock), context).first == 0.0, "no frame was made"
    clock.add("queue", 5.0)
    clock.frame_made()
    first = account.report(account.marks(clock), context).first
    assert 5.0 <= first < 65.0
    clock.add("queue", 5.0)
    clock.frame_made()
    assert account.report(account.marks(clock), context).first == first, "the first one counts"


def test_an_answer_that_never_begins_gives_its_memory_back(server: ServedApplication, known: Known) -> None:
    service = server.service
    memory = service.workers.all[0].memory
    resident = memory.held_bytes
    stream = service.stream(service.request(EXTRACT, json.dumps(known.extract([1, 2, 3])).encode()))
    held = stream.frames  # so that nothing is given back just because nobody holds it
    assert memory.held_bytes > resident
    stream.close()
    assert memory.held_bytes == resident and list(held) == []


def test_two_jobs_see_each_other(server: ServedApplication, known: Known) -> None:
    """One asks all the time, the other once in the middle: most of the work meanwhile was the first one's."""
    begun, stop = threading.Event(), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            exchange(server.port, "POST", EXTRACT, known.extract(list(range(40)), job="busy"))
            begun.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert begun.wait(240)
        _, seen = answered(server, EXTRACT, known.extract(list(range(40)), job="me"), "http")
    finally:
        stop.set()
        thread.join()
    assert delta(seen.others) > 0 and delta(seen.work) >= delta(seen.others)
    server.idle()  # the end of the other's last answer is accounted
    _, alone = answered(server, EXTRACT, known.extract(list(range(40)), job="me"), "http")
    assert 0 <= delta(alone.others) < 0.05 * delta(alone.work)
    _, stored = answered(server, SAMPLES, {**known.samples(), "job": "me"}, "http")
    assert stored.layers == () and stored.cos_batch == 0 and stored.cpu["read"] > 0


@pytest.mark.parametrize("path", [EXTRACT, SAMPLES])
def test_what_a_job_may_be_called(server: ServedApplication, known: Known, path: str) -> None:
    good = {EXTRACT: known.extract, SAMPLES: known.samples}[path]()
    for job in ("", "a", "0123456789abcdef" * 4, "ABCxyz"):
        assert exchange(server.port, "POST", path, {**good, "job": job}).status == 200
    for job in (
        None,
        1,
        True,
        [],
        {},
        ["a"],
        "a" * 65,
        "a b",
        "a-b",
        "ä",
        "٣",
        "²",
        "a\n",
        "\x00",
        "../x",
        "\ud800",
    ):
        check_problem(exchange(server.port, "POST", path, {**good, "job": job}), 400, "job: expected")


def test_time_layers_is_true_or_false(server: ServedApplication, known: Known) -> None:
    for wrong in (None, 1, 0, "true", "", [], {}):
        document = known.extract(time_layers=wrong)
        check_problem(exchange(server.port, "POST", EXTRACT, document), 400, "time_layers: expected")
    for path, document in ((SAMPLES, known.samples()), (TENSORS, known.tensors())):
        answer = exchange(server.port, "POST", path, {**document, "time_layers": True})
        check_problem(answer, 400, "unknown field 'time_layers'")


def test_a_report_that_lacks_something_is_refused(server: ServedApplication, known: Known) -> None:
    _, report = answered(server, EXTRACT, known.extract([1]), "http")
    document = report.to_json()
    for field in set(document) - {"layers"}:
        with pytest.raises(BadRequestError, match="report is malformed"):
            RequestReport.from_json({k: v for k, v in document.items() if k != field})
