"""``benchmarks tenants``: 1 to 10 tenants at once, against no batch adaptation and all-in-the-store, in one run.

Earlier HAPI text, section 5.5: each tenant asks for one job with a model of the seven, in turn, all at the same moment.
As there, clients compute nothing (``train`` has them train as ``hapi-train`` does); a job is over when its features are
there. A *mode* is a policy of batch adaptation (:mod:`hapi.server.batching.policies`); ``whole``, the COS batch as
large as the request, which is no adaptation; or ``store``, all in the store (:mod:`benchmarks.load.whole_jobs`).
All have the same storage cores and device-memory budget: unless it is given, what the largest whole job takes, so
that ``store`` can run.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.whole_jobs import WholeJob, run_whole_jobs
from benchmarks.testbed.bed import Bed, stop_all
from benchmarks.testbed.cells import PAPER_MODELS, Results
from benchmarks.testbed.photos import make_store, push_twins
from benchmarks.testbed.tiers import START_SECONDS, BenchClient, environment, start_server_process
from hapi.errors import HapiError, TransportError

POLICIES = ("auto", "adaptive", "fixed")
WHOLE, STORE = "whole", "store"
MODES = (*POLICIES, WHOLE, STORE)
COUNTS = (1, 2, 4, 6, 8, 10)
_TWINS = ("twin-a", "twin-b")
_SETTLE_SECONDS = 0.5
"""Seconds after which the watch has seen what the server holds now."""
_WARM_SAMPLES = 16

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TenantsSettings:
    """Measurements to take; each mode and number of tenants once."""

    models: tuple[str, ...] = PAPER_MODELS
    modes: tuple[str, ...] = ("auto", "adaptive", WHOLE, STORE)
    counts: tuple[int, ...] = COUNTS
    samples: int = 256
    """Samples of each job: one epoch."""
    request_size: int = 128
    """Samples of a request, and of the training batch."""
    image_size: int = 64
    device_memory: int | None = None
    """Bytes of the storage device; None for what the largest whole job takes."""
    running: int = 10
    """Requests that the server works on at a time: the earlier text's server takes all whose memory fits."""
    train: bool = False
    twin: str = "resnet18"
    """Model whose backbone two jobs share."""
    twin_layers: int = 9
    """Layers that they share."""

    def model(self, tenant: int) -> str:
        """The model of the tenant with this number, from 0 on."""
        return self.models[tenant % len(self.models)]


def measure_tenants(bed: Bed, settings: TenantsSettings, results: Results, tell: Tell) -> None:
    """Measure what ``results`` does not hold."""
    done = {(r["mode"], r["tenants"]) for r in results.records if r["kind"] == "run"}
    todo = {
        mode: counts
        for mode in settings.modes
        if (counts := [count for count in settings.counts if (mode, count) not in done])
    }
    sharing = not any(r["kind"] == "sharing" for r in results.records)
    tell(f"{sum(map(len, todo.values()))} runs to measure")
    if not todo and not sharing:
        return
    with bed, tempfile.TemporaryDirectory(prefix="hapi-tenants-") as folder:
        bed.set_bandwidth(None)
        bench = _Bench(bed, Path(folder), settings, results, tell)
        budget = bench.budget()
        for mode, counts in todo.items():
            for record in bench.store(counts, budget) if mode == STORE else bench.mode(mode, counts, budget):
                results.add({"kind": "run", "mode": mode, "budget": budget, **record})
                tell(f"{mode}, {record['tenants']} tenants: {max(record['seconds'], default=0):.1f} s")
        if sharing:
            results.add({"kind": "sharing", **bench.sharing(budget)})


class _Bench:
    """The store and the clients of one run."""

    def __init__(
        self, bed: Bed, folder: Path, settings: TenantsSettings, results: Results, tell: Tell
    ) -> None:
        self._bed, self._folder, self._settings = bed, folder, settings
        self._results, self._tell = results, tell
        self._token = secrets.token_hex(16)
        self._store = make_store(folder, settings.samples, settings.image_size, ("images",))
        self._jobs: list[WholeJob] = []
        self._clients: list[BenchClient] = []

    # -- all in the store ------------------------------------------------------------------------------------

    def budget(self) -> int:
        """The device's bytes in this run and those that it goes on with."""
        if self._settings.device_memory is not None:
            return self._settings.device_memory
        return max(self._needs().values())

    def _needs(self) -> Mapping[str, int]:
        """Bytes of a whole job by model, as they were seen once for all runs."""
        for record in self._results.records:
            if record["kind"] == "needs":
                return dict(record["bytes"])
        with self._server((), "store-0") as (url, _):
            found = {}
            for model in dict.fromkeys(self._settings.models):
                self._tell(f"{model}: what a whole job takes")
                client = BenchClient(self._bed, self._token, self._folder, f"needs-{model}", "server")
                job = WholeJob(client, self._job(url, model, "none"))
                found[model] = job.observe(self._settings.request_size)
                client.stop()
        self._results.add({"kind": "needs", "bytes": found})
        return found

    def store(self, counts: list[int], budget: int) -> Iterator[dict[str, Any]]:
        """A record for each of ``counts`` whole jobs at once."""
        needs = self._needs()
        with self._server((), "store-1") as (url, _):
            clients = [
                BenchClient(self._bed, self._token, self._folder, f"whole-{i}", "server")
                for i in range(max(counts))
            ]
            jobs = [
                WholeJob(client, self._job(url, self._settings.model(i), "none"))
                for i, client in enumerate(clients)
            ]
            for count in counts:
                of = [needs[self._settings.model(i)] for i in range(count)]
                load = _load()
                found = run_whole_jobs(jobs[:count], of, budget, self._settings.samples)
                yield {"tenants": count, "load": load, **found}
            for client in clients:
                client.stop()

    # -- with a server ---------------------------------------------------------------------------------------

    def mode(self, mode: str, counts: list[int], budget: int) -> Iterator[dict[str, Any]]:
        """A record for each number of tenants under one policy."""
        settings = self._settings
        policy = ("--cos-batch", str(settings.request_size)) if mode == WHOLE else ("--batching", mode)
        flags = (*policy, "--device-memory", str(budget))
        with self._server(flags, mode) as (url, watch):
            self._open(url, max(counts))
            for count in counts:
                yield {"tenants": count, "load": _load(), **self._run(count, watch)}

    def _open(self, url: str, count: int) -> None:
        """Clients with their sessions, and the server with their layers."""
        while len(self._clients) < count:
            name = f"client-{len(self._clients)}"
            self._clients.append(BenchClient(self._bed, self._token, self._folder, name))
        for number, client in enumerate(self._clients[:count]):
            client.call("open", **self._job(url, self._settings.model(number), "freeze"))
            self._do(client, _WARM_SAMPLES)

    def _do(self, client: BenchClient, samples: int) -> None:
        split = client.freeze
        if self._settings.train:
            client.call("epoch", split=split, samples=samples, epoch=1, limit=None)
        else:
            client.call("fetch", split=split, samples=samples, at_once=4)

    def _run(self, count: int, watch: _MetricsWatch) -> dict[str, Any]:
        began = time.monotonic()

        def one(client: BenchClient) -> tuple[float, str]:
            try:
                self._do(client, self._settings.samples)
            except HapiError as error:
                return 0.0, str(error)
            return time.monotonic() - began, ""

        with ThreadPoolExecutor(count) as threads:
            found = list(threads.map(one, self._clients[:count]))
        time.sleep(_SETTLE_SECONDS)
        seen = [line for line in watch.lines() if line["at"] >= began and "used" in line]
        return {
            "seconds": [round(seconds, 4) for seconds, error in found if not error],
            "errors": [error for _, error in found if error],
            "memory": [(round(line["at"] - began, 3), int(line["used"])) for line in seen],
            "out_of_memory": int(max((line.get("out_of_memory", 0) for line in seen), default=0)),
        }

    def sharing(self, budget: int) -> dict[str, Any]:
        """Resident weights before and after a second job whose model has the first one's backbone."""
        settings = self._settings
        prefix, differing = push_twins(
            self._store, settings.twin, settings.image_size, _TWINS, settings.twin_layers
        )
        resident = []
        with self._server(("--device-memory", str(max(budget, 8 * prefix))), "sharing") as (url, watch):
            client = BenchClient(self._bed, self._token, self._folder, "twin")
            for twin in _TWINS:
                client.call("open", **self._job(url, f"store:{twin}", "freeze"))
                self._do(client, _WARM_SAMPLES)
                time.sleep(_SETTLE_SECONDS)
                resident.append(int(_next_figures(watch).get("weights", 0)))
            client.stop()
        return {
            "model": settings.twin,
            "shared_layers": settings.twin_layers,
            "front_bytes": prefix,
            "differing_bytes": differing,
            "resident": resident,
        }

    def _job(self, url: str, model: str, split: str) -> dict[str, Any]:
        settings = self._settings
        return {
            "server": [url],
            "dataset": "images",
            "model": model,
            "weights": "random" if not model.startswith("store:") else "auto",
            "bs": settings.request_size,
            "request_size": settings.request_size,
            "split": split,
            "threads": 1,
            "device": "cpu",
        }

    def _server(self, flags: tuple[str, ...], name: str) -> _Server:
        self._tell(f"server: {' '.join(flags) or 'stored samples'}")
        flags = ("--max-running", str(self._settings.running), *flags)
        return _Server(self._bed, self._store, self._token, self._folder, flags, name)


def _load() -> float | None:
    """Load of the machine over the last minute: other work on the same cores makes runs hard to compare."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


class _Server:
    """A server and its watch, for the length of a ``with`` block."""

    def __init__(
        self, bed: Bed, store: Path, token: str, folder: Path, flags: tuple[str, ...], name: str
    ) -> None:
        self._start = (bed, store, token, folder, flags)
        self._name = name
        self._stack = ExitStack()

    def __enter__(self) -> tuple[str, _MetricsWatch]:
        bed, store, token, folder, flags = self._start
        process, url = start_server_process(bed, store, token, folder, flags, name=self._name)
        self._stack.callback(stop_all, [process])
        watch = _MetricsWatch(bed, url, token, folder / f"{self._name}.watch")
        self._stack.callback(watch.stop)
        return url, watch

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _MetricsWatch:
    """A process of :mod:`benchmarks.testbed.metrics_watch` on the client's side."""

    def __init__(self, bed: Bed, url: str, token: str, path: Path) -> None:
        self._path = path
        command = [sys.executable, "-m", "benchmarks.testbed.metrics_watch", url]
        with path.open("wb") as stdout:
            self._process = bed.start(
                "client", command, env=environment(token), stdin=subprocess.PIPE, stdout=stdout
            )

    def lines(self) -> list[dict[str, float]]:
        """All that it has seen; the last line may be under way."""
        text = self._path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def stop(self) -> None:
        """End the process."""
        stop_all([self._process])


def _next_figures(watch: _MetricsWatch) -> dict[str, float]:
    """Next observation of the watch; :class:`TransportError` when there is none for long."""
    now = time.monotonic()
    while not (seen := [line for line in watch.lines() if line["at"] >= now and "used" in line]):
        if time.monotonic() > now + START_SECONDS:
            raise TransportError(f"the watch of the server's memory saw nothing in {START_SECONDS:g} s")
        time.sleep(0.05)
    return seen[0]
