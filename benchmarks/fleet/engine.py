"""``benchmarks fleet``, the measured part: real servers and trainers on the test bed, cell by cell."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.bed import FleetBed
from benchmarks.fleet.cells import BS, COOL_DOWN, FREEZE, MODEL, SAMPLES, SIDE, FleetCell
from benchmarks.testbed.cells import Results
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import BenchClient, processor_seconds, start_server_process
from hapi.units import format_duration

Tell = Callable[[str], None]


def measure_cells(results: Results, cells: Sequence[FleetCell], tell: Tell) -> None:
    """Measure the profile, and the runs of cells that ``results`` does not have; first every cell once."""
    done = {(record["cell"], record["run"]) for record in results.records if record["kind"] == "cell"}
    runs = sorted(((cell, run) for cell in cells for run in range(cell.runs)), key=lambda one: one[1])
    todo = [(cell, run) for cell, run in runs if (cell.key, run) not in done]
    if not todo:
        return
    token = secrets.token_hex(16)
    largest = max(cell.servers for cell in cells)
    with tempfile.TemporaryDirectory() as place, FleetBed(largest) as bed:
        folder = Path(place)
        store = make_store(folder, SAMPLES, SIDE, ("float32",))
        servers = _start_servers(bed, store, token, folder, largest)
        module = "benchmarks.fleet.trainer"
        trainers = [
            BenchClient(bed, token, folder, name=f"trainer{number}", module=module)
            for number in range(max(cell.trainers for cell, _ in todo))
        ]
        if not any(record["kind"] == "profile" for record in results.records):
            tell("the profile of an idle server")
            trainers[0].call("open", **_settings(servers[:1]), split="auto")
            results.add({"kind": "profile", **_without_ok(trainers[0].call("profile"))})
        began = time.monotonic()
        for number, (cell, run) in enumerate(todo):
            found = _measured(bed, trainers[: cell.trainers], servers[: cell.servers], cell)
            results.add({"kind": "cell", "cell": cell.key, "run": run, "settings": asdict(cell), **found})
            left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
            tell(f"{number + 1} of {len(todo)}: {cell.key}; about {format_duration(left)} left")


@dataclass(frozen=True)
class _Server:
    """A server's process, and its URL."""

    process: subprocess.Popen[str]
    url: str


def _start_servers(bed: FleetBed, store: Path, token: str, folder: Path, count: int) -> list[_Server]:
    found = []
    for bed.number in range(count):
        found.append(_Server(*start_server_process(bed, store, token, folder, name=f"server{bed.number}")))
    return found


def _settings(servers: Sequence[_Server]) -> dict[str, Any]:
    return {
        "server": [server.url for server in servers], "dataset": "float32", "model": MODEL, "weights": "random:0",
        "freeze": FREEZE, "bs": BS, "request_size": BS, "image_size": SIDE, "threads": 1,
    }  # fmt: skip


def _measured(
    bed: FleetBed, trainers: Sequence[BenchClient], servers: Sequence[_Server], cell: FleetCell
) -> dict[str, Any]:
    """Run one cell; its figures."""
    bed.set_bandwidth(None)
    for number in range(len(servers)):
        bed.set_link(number, None)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(trainers)))
        opening = [
            pool.submit(trainer.call, "open", **_settings(servers), split="freeze", seed=number)
            for number, trainer in enumerate(trainers)
        ]
        for opened in opening:
            opened.result()
        bed.set_bandwidth(cell.shared)
        for number, rate in enumerate(cell.links):
            bed.set_link(number, rate)
        warm_up, measured = cell.seconds
        start = time.monotonic() + warm_up
        until = start + measured
        over = until + COOL_DOWN
        training = [pool.submit(trainer.call, "train", until=over, pause=cell.pause) for trainer in trainers]
        before = _read_at(start, bed, servers)
        after = _read_at(until, bed, servers)
        found = [trained.result() for trained in training]
    rates = [rate_between(one["began"], one["ends"], start, until) for one in found]
    seconds = after.at - before.at
    return {
        "samples_per_second": sum(rates),
        "trainers": rates,
        "retries": sum(one["retries"] for one in found),
        "stalled": [one["stalled"] for one in found],
        "trainer_cores": [one["cores"] for one in found],
        # Bits per second of each server's link, and of all together; and processors' worth of each server's work.
        "links": [8 * (late - early) / seconds for early, late in zip(before.sent, after.sent, strict=True)],
        "server_cores": [(late - early) / seconds for early, late in zip(before.cpu, after.cpu, strict=True)],
    }


@dataclass(frozen=True)
class _Reading:
    """Counters of the bed at one time."""

    at: float
    sent: list[int]
    cpu: list[float]


def _read_at(at: float, bed: FleetBed, servers: Sequence[_Server]) -> _Reading:
    """Wait until ``at``, and read the bytes that the links have carried and the servers' processor seconds."""
    time.sleep(max(0.0, at - time.monotonic()))
    return _Reading(time.monotonic(), bed.sent_bytes(), [processor_seconds(s.process.pid) for s in servers])


def rate_between(began: float, ends: Sequence[Sequence[float]], low: float, high: float) -> float:
    """Return the samples per second between two times; a batch that lies partly between them counts in part.

    Args:
        began: time at which the first batch began.
        ends: (time, samples) of each batch; one begins when the one before is over.
        low: seconds.
        high: seconds.
    """
    samples, since = 0.0, began
    for at, count in ends:
        inside = min(at, high) - max(since, low)
        if inside > 0:
            samples += count * inside / (at - since)
        since = at
    return samples / (high - low)


def _without_ok(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "ok"}
