"""``benchmarks stragglers``: one of four servers runs a tenth of the time; how long do requests take?

Four server processes on one half of the cores, the client in this process. The straggler is stopped and continued by
signals, so that all that it does takes ten times as long. Requests come at random times, at a rate below what three
servers can do: as a trainer asks whose own part is the slowest. Each is timed from when it is wanted.

Runs with and without the straggler follow each other, in pairs whose order alternates: a machine that becomes slower
meanwhile is as slow for both.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.overload import request_document
from benchmarks.load.overload_figures import percentile
from benchmarks.testbed.bed import Cores
from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import start_server_process
from hapi.client.transport.hedging import Measured
from hapi.client.transport.server_pool import ServerPool
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd, byte_view
from hapi.wire.messages import EXTRACT_PATH
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation
from hapi.wire.transport.http import HttpTransport

WAYS = ("in turn", "requests in flight", "answer times", "hedged")
"""Ways to choose a server; the last one also asks a second one."""
KIND = 1
PERIOD = 0.05
"""Seconds in which the straggler runs once."""
SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, kw_only=True)
class StragglersSettings:
    """Load to produce."""

    servers: int = 4
    pairs: int = 5
    """Runs of each way, with and without the straggler."""
    requests: int = 400
    """Requests of each run."""
    slower: float = 10.0
    """Times that the straggler takes."""
    load: float = 0.4
    """Requests a second, over those that one server can do at a time: all share half of the cores."""
    request_size: int = 2
    model: str = "resnet18"
    image_size: int = 64
    samples: int = 256


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Times of a run's requests, or of those of several."""

    seconds: tuple[float, ...]
    """Ascending."""
    extra: int
    retries: int

    @classmethod
    def of(cls, runs: Sequence[Waits]) -> Waits:
        """Return those of several runs together."""
        return cls(
            seconds=tuple(sorted(seconds for run in runs for seconds in run.seconds)),
            extra=sum(run.extra for run in runs),
            retries=sum(run.retries for run in runs),
        )

    def to_json(self) -> dict[str, Any]:
        """Return percentiles and counts."""
        found = {name: round(percentile(self.seconds, share), 5) for name, share in SHARES.items()}
        return {**found, "requests": len(self.seconds), "extra": self.extra, "retries": self.retries}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs that followed each other."""

    even: Waits
    """Without the straggler."""
    slow: Waits
    """With it."""

    @property
    def ratio(self) -> float:
        """99th percentile with it over that without."""
        return percentile(self.slow.seconds, 0.99) / percentile(self.even.seconds, 0.99)


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """All ways of one benchmark."""

    settings: StragglersSettings
    conditions: dict[str, Any]
    alone: float
    """Seconds of a request on idle servers, in the middle."""
    pairs: dict[str, list[Pair]]
    """By way."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures; the goal is 1.3 at most 2 % extra requests."""
        return {
            "benchmark": "stragglers",
            "conditions": self.conditions,
            "settings": asdict(self.settings),
            "alone": self.alone,
            "ways": {
                way: {
                    "without": Waits.of([pair.even for pair in pairs]).to_json(),
                    "with": Waits.of([pair.slow for pair in pairs]).to_json(),
                    "p99_ratios": [round(pair.ratio, 3) for pair in pairs],
                    "p99_ratio": round(statistics.median(pair.ratio for pair in pairs), 3),
                }
                for way, pairs in self.pairs.items()
            },
        }

    def table(self) -> list[str]:
        """Return the figures as lines for a person."""
        lines = [f"a request on idle servers {1e3 * self.alone:.1f} ms", ""]
        for way, found in self.to_json()["ways"].items():
            for name in ("without", "with"):
                waits = found[name]
                times = "  ".join(f"{share} {1e3 * waits[share]:7.1f} ms" for share in SHARES)
                extra = waits["extra"] / waits["requests"]
                lines.append(f"{way:<20}{name:>8}  {times}  extra {extra:.2%}")
            ratios = ", ".join(f"{ratio:.2f}" for ratio in found["p99_ratios"])
            lines.append(f"{'':<28}  p99 with over without: {found['p99_ratio']:.2f}, the median of {ratios}")
        return lines


def measure_stragglers(settings: StragglersSettings, tell: Callable[[str], None]) -> Stragglers:
    """Measure all ways; ``tell`` is given lines about the progress."""
    Cores.split_machine()  # says what is missing before anything is made
    with (
        LooseBed("requests are small") as bed,
        tempfile.TemporaryDirectory(prefix="hapi-stragglers-") as name,
    ):
        folder = Path(name)
        store = make_store(folder, settings.samples, settings.image_size, ("images",))
        token = secrets.token_hex(16)
        started = [
            start_server_process(bed, store, token, folder, name=f"server{n}")
            for n in range(settings.servers)
        ]
        document = request_document(store, settings.model, settings.image_size)
        client = _Client(settings, [url for _, url in started], token, document)
        alone = client.alone()
        rate = settings.load / alone
        pairs: dict[str, list[Pair]] = {way: [] for way in WAYS}
        for number in range(settings.pairs):
            for way in WAYS:
                runs: dict[bool, Waits] = {}
                for straggles in (False, True) if number % 2 == 0 else (True, False):
                    with slowed(started[-1][0].pid, settings.slower) if straggles else nullcontext():
                        runs[straggles] = client.run(way, rate)
                pairs[way].append(Pair(even=runs[False], slow=runs[True]))
                tell(f"pair {number + 1} of {settings.pairs}, {way}: {pairs[way][-1].ratio:.2f}")
        found = {**conditions(), "servers_and_client": bed.describe(), "rate": rate}
        return Stragglers(settings=settings, conditions=found, alone=alone, pairs=pairs)


@contextmanager
def slowed(pid: int, factor: float) -> Iterator[None]:
    """Let a process run one part in ``factor`` of the time inside the block."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.wait(PERIOD / factor):
            os.kill(pid, signal.SIGSTOP)
            over.wait(PERIOD * (1 - 1 / factor))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Client:
    """Asks the servers for features of random samples."""

    def __init__(
        self, settings: StragglersSettings, urls: list[str], token: str, document: dict[str, Any]
    ) -> None:
        self._settings, self._urls, self._token, self._document = settings, urls, token, document
        self._random = random.Random(0)

    def alone(self) -> float:
        """Seconds of a request in the middle, when there is no other; each server is asked often enough to be warm."""
        times = []
        for url in self._urls * 20:
            pool = self._pool([url])
            began = time.monotonic()
            pool.run(partial(self._ask_for, self._ids(), Cancellation()))
            times.append(time.monotonic() - began)
            pool.close()
        return statistics.median(times[len(times) // 2 :])

    def run(self, way: str, rate: float) -> Waits:
        """Ask in one way, ``rate`` times a second; the servers are not known before."""
        pool = self._pool(self._urls)
        waits: list[float] = []
        with ThreadPoolExecutor(128) as threads:
            due = time.monotonic()
            for number in range(self._settings.requests):
                due += self._random.expovariate(rate)
                time.sleep(max(0.0, due - time.monotonic()))
                wanted = time.monotonic()
                request = threads.submit(self._one, pool, way, number, self._ids())
                request.add_done_callback(partial(_note, waits, wanted))
        extra, retries = pool.extra_requests, pool.retries
        pool.close()
        return Waits(seconds=tuple(sorted(waits)), extra=extra, retries=retries)

    def _one(self, pool: ServerPool, way: str, number: int, ids: list[int]) -> None:
        if way == "in turn":
            only = self._urls[number % len(self._urls)]
            pool.run(partial(self._ask_for, ids, Cancellation()), only=only)
            return
        if way == "requests in flight":
            pool.run(partial(self._ask_for, ids, Cancellation()))
            return

        def second(transport: Transport, cancellation: Cancellation) -> Callable[[], None]:
            """Ask a second server."""
            self._ask_for(ids, cancellation, transport)
            return lambda: None

        measured = Measured(kind=KIND, samples=lambda: len(ids), second=second if way == "hedged" else None)
        pool.run(lambda transport: self._ask_for(ids, measured.cancellation, transport), measured=measured)

    def _ask_for(self, ids: list[int], cancellation: Cancellation, transport: Transport) -> None:
        transport.stream(EXTRACT_PATH, {**self._document, "ids": ids}, _read, cancellation)

    def _ids(self) -> list[int]:
        return self._random.sample(range(self._settings.samples), self._settings.request_size)

    def _pool(self, urls: list[str]) -> ServerPool:
        return ServerPool([HttpTransport(url, token=self._token) for url in urls])


def _note(waits: list[float], wanted: float, request: Any) -> None:
    request.result()
    waits.append(time.monotonic() - wanted)


def _read(reader: FrameReader) -> None:
    """Receive an answer, and keep nothing of it."""

    def sink(header: FrameHeader) -> list[memoryview]:
        return [byte_view(np.empty(tensor.nbytes, np.uint8)) for tensor in header.tensors]

    while not isinstance(reader.next(sink), StreamEnd):
        pass
