"""A store that accepts and never answers: what it may take of a server, and that the server can be ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.forked import ForkedProcess, environment
from support.harness import DIGITS_JOB, ServerProcess, losses, report_of, server, train
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TRANSFORM,
    Answer,
    Known,
    check_problem,
    exchange,
    make_store,
    metric,
    received,
    request_bytes,
    until,
)
from support.hung_store import BUCKET, HungStore, hung_store

from hapi.errors import StoreUnavailableError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.store.open import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def store(folder: Path) -> Iterator[HungStore]:
    with hung_store(folder) as running:
        yield running


def ask(port: int, path: str, document: object) -> socket.socket:
    """Begin a request and leave its connection open."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request_bytes(path, json.dumps(document).encode()))
    return sock


def hang(running: ServerProcess, store: HungStore, known: Known, count: int = 1) -> list[socket.socket]:
    """Requests for samples whose shards do not answer."""
    store.hang.add(".bin")
    before = len(store.asked)
    socks = [ask(running.port, SAMPLES, known.samples([n])) for n in range(count)]
    until(lambda: len(store.asked) > before, 20, "a read that hangs")
    return socks


def test_it_serves_as_a_folder_does(store: HungStore, known: Known) -> None:
    with server(f"s3://{BUCKET}", **store.environment) as running:
        known.check_features(exchange(running.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        names = exchange(running.port, "GET", "/v1/datasets").json()["datasets"]
        assert [d["name"] for d in names] == ["digits"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(store: HungStore, known: Known, number: signal.Signals) -> None:
    with server(
        f"s3://{BUCKET}", "--decode-processes", "1", "--drain-seconds", "1h", **store.environment
    ) as running:
        socks = hang(running, store, known, 3)
        children = _children(running.process.pid)
        assert children
        running.process.send_signal(number)
        until(lambda: exchange(running.port, "GET", "/readyz").status == 503, 5, "draining")
        assert running.process.poll() is None
        running.process.send_signal(number)
        assert running.process.wait(240) == 0
        until(lambda: not any(map(_alive, children)), 5, "the end of its children")
        for sock in socks:
            sock.close()


def test_a_drain_that_is_over_ends_it(store: HungStore, known: Known, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server(f"s3://{BUCKET}", "--drain-seconds", "0.5", log=log, **store.environment) as running:
        socks = hang(running, store, known)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(240) == 0
        assert json.loads(log.read_text().splitlines()[-1])["event"]
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_start_that_hangs_can_be_ended(store: HungStore, number: signal.Signals, code: int) -> None:
    store.hang.add("list-type")
    command = ["hapi.cli.server", "--store", f"s3://{BUCKET}", "--port", "0"]
    process = ForkedProcess(command, env=environment(**store.environment), stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(store.asked), 30, "the first look at the store")
        process.send_signal(number)
        assert process.wait(240) == code
    finally:
        process.kill()
        process.wait()


def test_the_end_of_its_parent_ends_it(store: HungStore, known: Known) -> None:
    command = [
        "hapi.cli.server",
        "--store",
        f"s3://{BUCKET}",
        "--port",
        "0",
        "--exit-with-stdin",
        "--threads",
        "1",
    ]
    process = ForkedProcess(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment(**store.environment),
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        store.hang.add(".bin")
        sock = ask(port, SAMPLES, known.samples([0]))
        until(lambda: bool(store.asked), 20, "a read that hangs")
        process.stdin.close()
        assert process.wait(240) == 0
        sock.close()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- hung reads while it serves ------------------------------------------------------------------------------------

IN_SHARDS = (0, 20, 39)
"""Samples of different shards."""
QUICK = ("--stuck-seconds", "1", "--max-running", "2")
BOUNDED = ("--max-request-seconds", "8")
"""Long enough for a model to be loaded on a machine with other work, and answers that may come late are asked again."""


def answers_well(port: int, path: str, document: object) -> Answer:
    """A sound answer, at last: one that this machine held up beyond the bound is an error."""
    answers: list[Answer] = []

    def sound() -> bool:
        answers.append(exchange(port, "POST", path, document))
        return answers[-1].status == 200

    until(sound, 20, "a sound answer")
    return answers[-1]


def ready(port: int) -> tuple[int, str]:
    answer = exchange(port, "GET", "/readyz")
    return answer.status, answer.body.decode()


def lost(port: int) -> dict[str, int]:
    found: dict[str, int] = exchange(port, "GET", "/v1/status").json()["lost_threads"]
    return found


def stages(port: int) -> list[str]:
    """What all requests that hold a slot are at."""
    running = exchange(port, "GET", "/v1/status").json()["running"]
    return [stage for request in running for stage in request["stages"]]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[HungStore, Known, Known]]:
    """A store with two datasets, of which the samples of ``digits`` can hang alone."""
    folder = make_store(tmp_path / "two")
    store = open_store(str(folder))
    options = PackOptions(limit=20, transform=TRANSFORM, shard_bytes=2000)
    pack(open_source("sklearn:digits"), store, "others", options)
    with hung_store(folder) as running:
        yield running, Known(folder), Known(folder, "others")


def test_readers_of_one_data_set_do_not_take_the_slots_of_another(
    two: tuple[HungStore, Known, Known],
) -> None:
    """Clients that leave hung reads, again and again, cost their own dataset, and nobody else."""
    store, known, others = two
    with server(f"s3://{BUCKET}", *QUICK, **store.environment) as running:
        port = running.port
        store.hang.add("/digits/.*/shard-")
        for _ in range(3):
            socks = [ask(port, SAMPLES, known.samples([n])) for n in IN_SHARDS]
            until(
                lambda: metric(port, "hapi_requests_running") >= 2 or lost(port)["now"] >= 2,
                10,
                "slots taken",
            )
            until(lambda: len(store.asked) >= 2, 10, "reads that hang")
            for sock in socks:
                sock.close()
            until(lambda: metric(port, "hapi_requests_running") == 0, 10, "free slots")
            assert exchange(port, "POST", SAMPLES, others.samples([1])).status == 200
        until(lambda: lost(port)["now"] >= 2, 10, "lost threads")
        assert exchange(port, "POST", EXTRACT, others.extract([3, 0, 17])).status == 200
        detail = check_problem(exchange(port, "POST", SAMPLES, known.samples([30])), 502, "digits")
        assert "no more are begun" in detail
        count = lost(port)["now"]
        assert 2 <= count <= 4 and metric(port, "hapi_threads_lost") == count
        store.release()
        until(lambda: lost(port)["now"] == 0, 10, "the return of the lost threads")
        assert lost(port)["ever"] == count
        assert exchange(port, "POST", SAMPLES, known.samples([30])).status == 200
        known.check_features(exchange(port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        assert ready(port)[0] == 200


def test_readiness_says_stuck_and_recovers(store: HungStore, known: Known) -> None:
    """While all that runs hangs; health stays, and the answers come when the store does."""
    with server(f"s3://{BUCKET}", *QUICK, **store.environment) as running:
        answers: list[Answer] = []
        store.hang.add("/digits/.*/shard-")
        asking = threading.Thread(
            target=lambda: answers.append(exchange(running.port, "POST", SAMPLES, known.samples([3])))
        )
        asking.start()
        until(lambda: ready(running.port)[0] == 503, 15, "the word that it is stuck")
        assert "stuck" in ready(running.port)[1] and metric(running.port, "hapi_stuck") == 1
        assert exchange(running.port, "GET", "/healthz").status == 200
        store.release()
        asking.join(240)
        assert answers[0].status == 200
        until(lambda: ready(running.port)[0] == 200, 15, "its recovery")
        assert lost(running.port)["ever"] == 0


def test_who_waits_too_long_is_told(store: HungStore, known: Known) -> None:
    """Before and in the middle of an answer; those who wait for the same chunk hear of it too."""
    with server(f"s3://{BUCKET}", *QUICK, *BOUNDED, "--chunk-cache", "64MiB", **store.environment) as running:
        store.hang.add("/digits/.*/shard-")
        with ThreadPoolExecutor(2) as clients:
            asked = [
                clients.submit(exchange, running.port, "POST", SAMPLES, known.samples([n])) for n in (3, 4)
            ]
            for answer in asked:
                check_problem(answer.result(240), 502, "digits")
        until(lambda: metric(running.port, "hapi_requests_running") == 0, 10, "free slots")
        until(lambda: lost(running.port)["now"] >= 1, 10, "lost threads")
        assert exchange(running.port, "GET", "/v1/datasets/digits").status == 200


def test_descriptions_that_hang_leave_room_for_others(two: tuple[HungStore, Known, Known]) -> None:
    store, _, _ = two
    with server(f"s3://{BUCKET}", *QUICK, **store.environment) as running:
        store.hang.add("/digits/manifest")
        with ThreadPoolExecutor(3) as clients:
            path = "/v1/datasets/digits"
            hung = [clients.submit(exchange, running.port, "GET", path) for _ in range(3)]
            until(lambda: len(store.asked) >= 2, 10, "hung descriptions")
            answer = exchange(running.port, "GET", "/v1/datasets/others")
            assert answer.status == 200
            for one in hung:
                check_problem(one.result(240), 502, "digits")


def test_beyond_the_bound_it_stays_stuck(store: HungStore, known: Known) -> None:
    with server(f"s3://{BUCKET}", *QUICK, "--max-lost-threads", "1", **store.environment) as running:
        for sock in hang(running, store, known, 3):
            sock.close()
        until(lambda: ready(running.port)[0] == 503, 15, "the word that it is stuck")
        until(lambda: lost(running.port) == {"now": 1, "ever": 1, "most": 1}, 10, "the one that may be lost")
        assert ready(running.port)[0] == 503
        store.release()
        until(lambda: ready(running.port)[0] == 200, 15, "its recovery")
        assert lost(running.port)["now"] == 0
        assert exchange(running.port, "POST", SAMPLES, known.samples([0])).status == 200


def test_a_job_goes_on_beside_a_data_set_that_hangs(
    two: tuple[HungStore, Known, Known], tmp_path: Path
) -> None:
    store, known, _ = two
    job = (*DIGITS_JOB, "--bs", "10", "--epochs", "2", "--dataset", "others", "--split", "9")
    with server(f"s3://{BUCKET}", *QUICK, **store.environment) as running:
        reports = [tmp_path / f"report{number}.json" for number in range(2)]
        train(*job, "--server", running.url, "--report", str(reports[0]))
        store.hang.add("/digits/.*/shard-")
        socks = [ask(running.port, SAMPLES, known.samples([n])) for n in range(2)]
        until(lambda: bool(store.asked), 20, "a read that hangs")
        for sock in socks:
            sock.close()
        train(*job, "--server", running.url, "--report", str(reports[1]))
        assert losses(report_of(reports[0])) == losses(report_of(reports[1]))


def test_a_local_file_that_stalls_and_a_fifo(tmp_path: Path) -> None:
    """A file whose open does not return (a lease, as file servers have them, that is not given back), and a FIFO."""
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    stalled, fifo = (sorted(folder.glob("datasets/digits/*/shard-*"))[n] for n in (0, 2))
    fifo.unlink()
    os.mkfifo(fifo)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    holder = os.open(stalled, os.O_RDWR)
    try:
        with server(folder, *QUICK, *BOUNDED, "--chunk-cache", "0") as running:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            port = running.port
            detail = check_problem(exchange(port, "POST", SAMPLES, known.samples([39])), (500, 502))
            assert "FIFO" in detail or "shard" in detail
            socks = [ask(port, SAMPLES, known.samples([n])) for n in (0, 1)]
            for sock in socks:
                sock.close()
            check_problem(exchange(port, "POST", SAMPLES, known.samples([2])), 502, "digits")
            until(
                lambda: lost(port)["now"] >= 1 and metric(port, "hapi_requests_running") == 0,
                10,
                "lost threads",
            )
            assert exchange(port, "GET", "/v1/models").status == 200 and ready(port)[0] == 200
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            until(lambda: lost(port)["now"] == 0, 10, "the return of the lost threads")
            answers_well(port, SAMPLES, known.samples([2]))
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)


def test_an_answer_that_hangs_in_the_middle_ends_with_an_error(store: HungStore, known: Known) -> None:
    """After the status line an error frame tells it."""
    arguments = (*QUICK, *BOUNDED, "--cos-batch", "2", "--chunk-cache", "0")
    with server(f"s3://{BUCKET}", *arguments, **store.environment) as running:
        known.check_features(answers_well(running.port, EXTRACT, known.extract([0, 1])).body, [0, 1])
        store.hang.add("/digits/.*/shard-00002")
        answer = exchange(running.port, "POST", EXTRACT, known.extract([0, 1, 2, 3, 39, 38]))
        assert answer.status == 200
        with pytest.raises(StoreUnavailableError, match="digits"):
            received(answer.body, 2)
        until(lambda: metric(running.port, "hapi_requests_running") == 0, 10, "its slot")


def test_memory_of_a_device_is_not_held_by_what_hangs(two: tuple[HungStore, Known, Known]) -> None:
    """Neither by who waits for samples, nor by who waits for a model's weights."""
    store, known, others = two
    arguments = (*QUICK, "--device-memory", "20MB", "--batching", "adaptive")
    with server(f"s3://{BUCKET}", *arguments, **store.environment) as running:
        store.hang.add("/digits/.*/shard-")
        socks = [ask(running.port, EXTRACT, known.extract([n] * 500)) for n in IN_SHARDS[:2]]
        until(lambda: bool(store.asked), 20, "a read that hangs")
        for sock in socks:
            sock.close()
        answer = exchange(running.port, "POST", EXTRACT, others.extract([3] * 500))
        others.check_features(answer.body, [3] * 500)


def test_a_decoding_process_that_stands_still_is_replaced(folder: Path, known: Known) -> None:
    with server(folder, *QUICK, "--decode-processes", "1") as running:
        (decoder,) = _children(running.process.pid)
        os.kill(decoder, signal.SIGSTOP)
        sock = ask(running.port, EXTRACT, known.extract())
        until(lambda: "decode" in stages(running.port), 10, "an order for the process")
        sock.close()
        until(lambda: metric(running.port, "hapi_requests_running") == 0, 10, "the end of the request")
        answer = exchange(running.port, "POST", EXTRACT, known.extract())
        known.check_features(answer.body, [3, 39, 0, 17])
        assert lost(running.port)["ever"] == 0 and not _alive(decoder)


def test_damaged_jpegs_leave_the_log_readable(tmp_path: Path) -> None:
    """libjpeg's own warnings become lines of JSON, of the server and of processes that decode."""
    source = tmp_path / "images" / "one"
    source.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for number in range(2):
        Image.fromarray(pixels).save(source / f"{number}.jpg")
        data = bytearray((source / f"{number}.jpg").read_bytes())
        for place in range(20):
            data[len(data) // 2 + 7 * place] = 0xFF if place % 2 else 0xD9
        (source / f"{number}.jpg").write_bytes(data)
    folder = tmp_path / "store"
    pack(
        open_source(str(source.parent)),
        open_store(str(folder)),
        "images",
        PackOptions(transform=TRANSFORM),
    )
    known = Known(folder, "images")
    for processes in ("0", "1"):
        log = tmp_path / f"log{processes}"
        with server(folder, "--decode-processes", processes, log=log) as running:
            check_problem(exchange(running.port, "POST", EXTRACT, known.extract([0])), 500, "sample 0")
            until(lambda text=log: "Corrupt JPEG" in text.read_text(), 10, "libjpeg's warning")  # type: ignore[misc]
            assert running.stop() == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["event"] for line in lines if "Corrupt JPEG" in line.get("text", "")] == [
            "library output"
        ]
