"""``benchmarks fleet``, the measured part: real servers and trainers on the test bed, cell by cell."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleet.bed import FleetBed
from benchmarks.fleet.cells import BS, FREEZE, MEASURED, MODEL, SAMPLES, SIDE, WARM_UP, FleetCell
from benchmarks.testbed.cells import Results
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import BenchClient, start_server
from hapi.units import format_duration

Tell = Callable[[str], None]


def measure_cells(results: Results, cells: Sequence[FleetCell], tell: Tell) -> None:
    """Measure the profile, and the cells that ``results`` does not have."""
    done = {record["cell"] for record in results.records if record["kind"] == "cell"}
    todo = [cell for cell in cells if cell.key not in done]
    if not todo:
        return
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as place, FleetBed(max(c.servers for c in todo)) as bed:
        folder = Path(place)
        store = make_store(folder, SAMPLES, SIDE, ("float32",))
        urls = _start_servers(bed, store, token, folder, max(c.servers for c in todo))
        module = "benchmarks.fleet.trainer"
        trainers = [
            BenchClient(bed, token, folder, name=f"trainer{number}", module=module)
            for number in range(max(c.trainers for c in todo))
        ]
        if not any(record["kind"] == "profile" for record in results.records):
            tell("the profile of an idle server")
            trainers[0].call("open", **_settings(urls[:1]), split="auto")
            results.add({"kind": "profile", **_without_ok(trainers[0].call("profile"))})
        began = time.monotonic()
        for number, cell in enumerate(todo):
            results.add(_measured(bed, trainers[: cell.trainers], urls[: cell.servers], cell))
            left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
            tell(f"{number + 1} of {len(todo)}: {cell.key}; about {format_duration(left)} left")


def _start_servers(bed: FleetBed, store: Path, token: str, folder: Path, count: int) -> list[str]:
    urls = []
    for bed.number in range(count):
        urls.append(start_server(bed, store, token, folder, name=f"server{bed.number}"))
    return urls


def _settings(urls: Sequence[str]) -> dict[str, Any]:
    return {
        "server": list(urls), "dataset": "float32", "model": MODEL, "weights": "random:0", "freeze": FREEZE, "bs": BS,
        "request_size": BS, "image_size": SIDE, "threads": 1,
    }  # fmt: skip


def _measured(
    bed: FleetBed, trainers: Sequence[BenchClient], urls: Sequence[str], cell: FleetCell
) -> dict[str, Any]:
    """Run one cell; its record."""
    bed.set_bandwidth(None)
    for number in range(len(urls)):
        bed.set_link(number, None)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(trainers)))
        opening = [
            pool.submit(trainer.call, "open", **_settings(urls), split="freeze", seed=number)
            for number, trainer in enumerate(trainers)
        ]
        for opened in opening:
            opened.result()
        bed.set_bandwidth(cell.shared)
        for number, rate in enumerate(cell.links):
            bed.set_link(number, rate)
        start = time.monotonic()
        until = start + WARM_UP + MEASURED
        training = [pool.submit(trainer.call, "train", until=until, pause=cell.pause) for trainer in trainers]
        found = [trained.result() for trained in training]
    rates = [rate_between(ends["ends"], start + WARM_UP, until) for ends in found]
    return {
        "kind": "cell",
        "cell": cell.key,
        "settings": asdict(cell),
        "samples_per_second": sum(rates),
        "trainers": rates,
        "retries": sum(ends["retries"] for ends in found),
    }


def rate_between(ends: Sequence[Sequence[float]], low: float, high: float) -> float:
    """Return the samples per second of batches that ended between two times.

    Args:
        ends: (time, samples) of each batch.
        low: seconds.
        high: seconds.
    """
    return sum(samples for at, samples in ends if low < at <= high) / (high - low)


def _without_ok(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "ok"}
