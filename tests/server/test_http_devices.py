"""What a request sees of the devices: the COS batch that fits, 507 with numbers, several devices, merged passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.http_tools import (
    EXTRACT,
    SPLIT,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    metric,
    received,
    served,
    until,
)
from support.waiting import PATIENCE
from test_http_clients import long_request, opened, reset

from hapi.clocks import StageClock
from hapi.errors import UsageError
from hapi.process.threads import Threads
from hapi.server.batching.forward_memory import ForwardMemory
from hapi.server.device.memory_budget import DeviceMemory, MemoryRequest
from hapi.server.device.worker import DeviceWorker, make_workers
from hapi.server.http.app import Application
from hapi.server.lifecycle import run
from hapi.server.lifecycle.progress_watch import ProgressWatch
from hapi.server.lifecycle.reload import Reload
from hapi.server.service import Service
from hapi.server.settings import ListenSettings, ServerSettings
from hapi.store.open import open_store
from hapi.waiting import Interest
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.messages import ExtractRequest
from hapi.wire.report import STAGES, RequestReport

IDS = list(range(40))
MERGED_RTOL = 1e-5
"""Of the largest feature: what summing in another order changes when passes run together."""


def frames_of(body: bytes) -> tuple[list[int], RequestReport]:
    """Samples of each frame, and the report."""
    reader = FrameReader(BufferSource(iter([body])))
    counts: list[int] = []
    while True:
        header = reader.next(lambda h: [memoryview(bytearray(t.nbytes)) for t in h.tensors])
        if isinstance(header, StreamEnd):
            return counts, RequestReport.from_json(header.report)
        counts.append(len(header.ids))


def asked(server: ServedApplication, known: Known, **changes: Any) -> tuple[list[int], RequestReport]:
    answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS, **changes))
    assert answer.status == 200, answer.body[:300]
    known.check_features(answer.body, IDS)
    return frames_of(answer.body)


def test_adaptive_takes_what_there_is(folder: Path, known: Known) -> None:
    with served(folder, batching="adaptive") as server:
        counts, report = asked(server, known)
        assert counts == [40] and report.cos_batch == 40
        weights = server.service.workers.all[0].cache.resident_bytes
        claimed = ledger_bytes(server, known, 40)
    with served(folder, batching="adaptive", device_memory=weights + claimed // 3) as server:
        counts, _ = asked(server, known)
        assert sum(counts) == 40 and 1 <= max(counts) <= 14, counts
        server.idle()  # the client may have all of it before the server has put everything away
        assert server.service.workers.all[0].memory.held_bytes == 0


@pytest.mark.slow_except("auto")
@pytest.mark.parametrize("batching", ["adaptive", "auto"])
def test_no_pass_begins_with_fewer_samples_than_the_provider_wants(
    folder: Path, known: Known, batching: str
) -> None:
    with served(folder, batching=batching) as server:
        asked(server, known)
        weights = server.service.workers.all[0].cache.resident_bytes
        room = weights + int(1.2 * ledger_bytes(server, known, 25))
    with served(folder, batching=batching, min_cos_batch=25, device_memory=room, max_running=4) as server:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: asked(server, known)[0], range(4)))
        assert all(sum(counts) == 40 and counts[0] >= 25 for counts in answers), answers
    with served(
        folder, batching=batching, min_cos_batch=25, device_memory=weights + (room - weights) // 2
    ) as server:
        counts, _ = asked(server, known)
        assert sum(counts) == 40 and counts[0] < 25, "an empty device without the room takes what fits"


def ledger_bytes(server: ServedApplication, known: Known, batch: int) -> int:
    """What the server predicts for a COS batch of the known request."""
    request = ExtractRequest.from_json(known.extract(IDS))
    return server.service.workers.sizing.of(request).forward.of(batch)


def test_a_request_that_cannot_fit_gets_507_with_the_numbers(folder: Path, known: Known) -> None:
    with served(folder, device_memory=100_000) as server:
        answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS))
        check_problem(answer, 507, "bytes for one sample", "of weights", "100000")
        server.idle()
        assert server.service.workers.all[0].cache.resident_bytes == 0, "nothing was loaded for it"


@pytest.mark.slow
def test_many_at_once_within_a_tight_budget(folder: Path, known: Known) -> None:
    """More than fit at a time: all get their answers, and the ledger is never beyond the budget."""
    with served(folder) as server:
        asked(server, known)
        budget = server.service.workers.all[0].cache.resident_bytes + int(
            1.5 * ledger_bytes(server, known, 16)
        )
    seen: list[int] = []
    with served(folder, device_memory=budget, max_running=4, batching="fixed") as server:
        memory, over = server.service.workers.all[0].memory, threading.Event()

        def look() -> None:
            while not over.wait(0.0005):
                seen.append(memory.used_bytes)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                with all_memory(server):
                    answers = [pool.submit(asked, server, known) for _ in range(16)]
                    until(lambda: memory.waiting > 0, 60, "one that waits for memory")
                found = [answer.result() for answer in answers]
        finally:
            over.set()
            watcher.join()
        assert all(counts == [16, 16, 8] for counts, _ in found)
        assert any(report.seconds["device_wait"] > 0 for _, report in found)
        assert 0 < max(seen) <= budget and memory.waiting == 0


@contextmanager
def all_memory(server: ServedApplication) -> Iterator[DeviceMemory]:
    """Somebody holds all of the device's memory."""
    memory = server.service.workers.all[0].memory
    ask = MemoryRequest(
        key=("other", 1, (1,)),
        samples=1,
        forward=ForwardMemory(layers=((memory.budget // 512 * 512, 0),)),
        weights=(),
        smallest=1,
        largest=1,
    )
    with memory.reserve(ask, Interest()):
        yield memory


@pytest.mark.slow
def test_a_false_digest_does_no_harm_to_who_waits_beside_it(folder: Path, known: Known) -> None:
    """A digest is a client's word until the front is loaded."""
    false = known.extract(IDS, split=SPLIT + 1)
    false["model"] |= {"digest": known.extract(IDS)["model"]["digest"]}
    with served(folder, max_running=8) as server:
        with ThreadPoolExecutor(4) as pool:
            with all_memory(server) as memory:
                lies = [pool.submit(exchange, server.port, "POST", EXTRACT, false) for _ in range(2)]
                truths = [pool.submit(asked, server, known) for _ in range(2)]
                until(lambda: memory.waiting == 4, 60, "all four wait for memory")
            for lie in lies:
                check_problem(lie.result(), 409, "digest")
            assert all(sum(truth.result()[0]) == len(IDS) for truth in truths)
        server.idle()
        assert memory.held_bytes == 0 and memory.waiting == 0


def test_a_client_that_leaves_while_it_waits_for_memory(folder: Path, known: Known) -> None:
    """Its place and its slot are free at once, not when the memory comes."""
    with served(folder) as server:
        with all_memory(server) as memory:
            sock = opened(server.port, long_request(known, 8))
            until(lambda: memory.waiting == 1, 60, "the wait for memory")
            reset(sock)
            until(lambda: memory.waiting == 0, 10, "the end of the wait")
            server.idle()
        asked(server, known)


def test_nobody_waits_for_memory_beyond_the_longest_time(folder: Path, known: Known) -> None:
    with served(folder, max_request_seconds=2.0) as server, all_memory(server) as memory:
        answer = exchange(server.port, "POST", EXTRACT, known.extract(IDS))
        check_problem(answer, 429, "device's memory", "--max-request-seconds")
        assert memory.waiting == 0 and int(answer.headers["Retry-After"]) >= 1


@pytest.mark.slow
def test_requests_are_spread_over_devices(folder: Path, known: Known) -> None:
    with served(folder, device="cpu,cpu", max_running=2) as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: asked(server, known), range(24)))
        server.idle()
        loaded = [worker.cache.misses for worker in server.service.workers.all]
        assert sum(loaded) <= 2 and loaded[0] == 1, "a device that has the layers is preferred"
        for worker in server.service.workers.all:
            assert worker.running == 0


def test_a_busy_device_gets_help(folder: Path) -> None:
    workers = make_workers(ServerSettings(store=str(folder), device="cpu,cpu"), open_store(str(folder)))
    first, second = workers.all
    first.cache.has = lambda key: True  # type: ignore[method-assign]
    try:
        with workers.one("front") as one, workers.one("front") as two:
            assert one is first and two is first
            with workers.one("front") as three, workers.one("front") as four:
                assert {id(three), id(four)} == {id(first), id(second)}
    finally:
        workers.close()


@pytest.mark.parametrize("device", ["cuda,cuda", "cpu,cuda", "cpu,", "tpu", "cpu;cpu"])
def test_devices_that_make_no_sense(folder: Path, device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        make_workers(ServerSettings(store=str(folder), device=device), open_store(str(folder)))


def break_device(worker: DeviceWorker, patch: pytest.MonkeyPatch) -> None:
    """Loading layers fails from now on, and so does all else, as after an illegal access on a GPU."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    patch.setattr(worker.prefixes, "load", refuse)
    patch.setattr(worker.device.health, "probe", refuse)


def test_a_broken_device_is_left_out(folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, device="cpu,cpu") as server:
        first, second = server.service.workers.all
        break_device(first, monkeypatch)
        check_problem(exchange(server.port, "POST", EXTRACT, known.extract()), 503, "illegal memory access")
        for _ in range(3):
            asked(server, known)
        assert exchange(server.port, "GET", "/readyz").status == 200 and second.cache.misses == 1
        break_device(second, monkeypatch)
        other = known.extract(split=SPLIT + 1)
        check_problem(exchange(server.port, "POST", EXTRACT, other), 503, "illegal memory access")
        check_problem(exchange(server.port, "GET", "/readyz"), 503, "no device")
        check_problem(exchange(server.port, "POST", EXTRACT, known.extract()), 503, "no device")


def test_a_request_error_breaks_no_device(
    folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(folder) as server, monkeypatch.context() as patch:
        break_device(server.service.workers.all[0], patch)
        patch.setattr(server.service.workers.all[0].device.health, "probe", lambda: None)
        assert exchange(server.port, "POST", EXTRACT, known.extract()).status == 500
        patch.undo()
        asked(server, known)


def test_a_server_without_a_working_device_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an exit code by which a supervisor starts it again."""
    service = Service(ServerSettings(store=str(folder), device="cpu"), open_store(str(folder)))
    application = Application(service)
    monkeypatch.setattr("hapi.server.lifecycle.run.HEALTH_SECONDS", 0.05)
    service.workers.all[0].device.health.broken = "CUDA error"
    try:
        listening = ListenSettings(port=0)
        assert asyncio.run(run._serve(application, listening, Reload(listening))) == 1
    finally:
        application.close()
        service.close()


def test_an_idle_server_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so often while nothing runs, and not while something does."""
    application: Any = SimpleNamespace(running=1)
    workers = SimpleNamespace(usable=True)
    given: list[int] = []
    monkeypatch.setattr("hapi.server.lifecycle.run.HEALTH_SECONDS", 0.01)
    monkeypatch.setattr("hapi.server.lifecycle.run.IDLE_SECONDS", 0.03)
    monkeypatch.setattr(
        "hapi.server.lifecycle.run.give_back_freed_memory", lambda: given.append(application.running)
    )
    looks = Threads(1, "test")
    application.service, application.status_threads = SimpleNamespace(workers=workers), looks

    async def live() -> None:
        stop = asyncio.Event()
        served = asyncio.create_task(run._stopped(application, stop))
        await asyncio.sleep(0.2)
        assert not given
        application.running = 0
        while len(given) < 2:
            await asyncio.sleep(0.01)
        stop.set()
        assert await served == 0

    try:
        asyncio.run(asyncio.wait_for(live(), 240))
    finally:
        looks.close()
    assert set(given) == {0}


def test_a_signal_is_heard_while_a_look_at_the_server_hangs(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    application: Any = SimpleNamespace(
        running=0, service=SimpleNamespace(workers=SimpleNamespace(usable=True))
    )
    monkeypatch.setattr("hapi.server.lifecycle.run.HEALTH_SECONDS", 0.01)
    monkeypatch.setattr("hapi.server.lifecycle.run.IDLE_SECONDS", 0.01)
    looks = application.status_threads = Threads(1, "test")
    looks.submit(gate.wait, PATIENCE)
    until(looks.running, 20, "the look that hangs")

    async def live() -> None:
        stop = asyncio.Event()
        served = asyncio.create_task(run._stopped(application, stop))
        while not looks._queued:
            await asyncio.sleep(0.01)
        stop.set()
        assert await served == 0

    try:
        asyncio.run(asyncio.wait_for(live(), PATIENCE / 2))
    finally:
        gate.set()
        looks.close()


def test_accounts_in_a_folder_that_hangs_hold_up_no_look(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    begun, watch, looks = threading.Event(), ProgressWatch(60.0, 1), Threads(1, "test")

    def write() -> None:
        begun.set()
        gate.wait(PATIENCE)

    application: Any = SimpleNamespace(
        board=SimpleNamespace(accounts=SimpleNamespace(write=write)),
        service=SimpleNamespace(watch=watch),
        status_threads=looks,
    )
    monkeypatch.setattr("hapi.server.lifecycle.run.WRITE_SECONDS", 0.01)

    async def live() -> None:
        keeping = asyncio.create_task(run._keep_accounts(application))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert looks.submit(pow, 2, 2).result(PATIENCE / 2) == 4
        keeping.cancel()

    try:
        asyncio.run(live())
    finally:
        gate.set()
        looks.close()
        watch.close()


@pytest.mark.slow
def test_layers_loaded_for_each_request_are_counted_for_each(folder: Path, known: Known) -> None:
    with served(folder, model_reuse=False) as server:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: asked(server, known), range(3)))
        server.idle()
        memory = server.service.workers.all[0].memory
        assert memory.used_bytes == 0 and metric(server.port, "hapi_model_cache_misses_total") == 3


@pytest.fixture
def merging(folder: Path) -> Iterator[ServedApplication]:
    with served(folder, merge=64, max_running=8) as server:
        yield server


def test_merged_requests_get_their_own_answers(merging: ServedApplication, known: Known) -> None:
    """Different samples of the same layers at the same time; the difference from running alone is bounded."""
    device = merging.service.workers.all[0].device
    asked(merging, known)  # the layers are there
    gate = threading.Event()
    with torch.inference_mode():
        blocker = device.begin(
            lambda x: (gate.wait(240), x)[1], torch.zeros(1, 1), torch.zeros(1, 1), key="gate", clock=_clock()
        )
    wanted = [[n, 39 - n, 2 * n] for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(exchange, merging.port, "POST", EXTRACT, known.extract(ids)) for ids in wanted]
        _until_waiting(device, 6)
        gate.set()
        answers = [one.result() for one in running]
    blocker.result()
    assert device.merged == 6
    for ids, answer in zip(wanted, answers, strict=True):
        got_ids, (features, _) = received(answer.body, 2)
        assert got_ids == ids
        alone = known.features(ids, SPLIT)
        got = torch.from_numpy(features.view(np.float32)).reshape(alone.shape)
        torch.testing.assert_close(got, alone, rtol=0, atol=MERGED_RTOL * float(alone.abs().max()))


def _clock() -> Any:
    return StageClock(STAGES)


def _until_waiting(device: Any, count: int) -> None:
    until(lambda: device.waiting == count, 20, f"{count} waiting passes")
