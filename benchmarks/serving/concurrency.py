"""``benchmarks concurrency``: requests side by side on one server (later HAPI text, Figure 14), and several clients
(earlier text, Figure 11).

As in the texts nothing is done with what arrives: the client only receives. For each model four splits, ordered by
index: how much faster the requests of a batch are answered 2 or 4 at a time than one after another, from the first
request to the last byte. Then 1, 2 and 4 clients that want the same epoch at once.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.settings import StudySettings
from benchmarks.testbed.bed import Bed
from benchmarks.testbed.cells import Results
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import BenchClient, start_server
from hapi.units import format_bandwidth, format_bytes

AT_ONCE = (1, 2, 4)
"""Requests at a time; the server runs 4 (later text, section 5.1)."""
SPLITS = 4
"""Splits of each model (later text, Figure 14)."""
TENANTS = (1, 2, 4)
"""Clients at a time."""
_TENANT_REQUESTS = 8
"""Requests of a client's epoch, 4 at a time."""


@dataclass(frozen=True, kw_only=True)
class ConcurrencySettings(StudySettings):
    """Measurements to take, over a link."""

    repeats: int = 5
    bandwidth: float = 160e6
    """Bits per second."""
    request_size: int = 16


@dataclass(frozen=True, kw_only=True)
class ConcurrencyRow:
    """One split of one model."""

    model: str
    split: int
    request_bytes: int
    seconds: dict[int, float]
    """Requests at a time to the median seconds until all of them were answered."""

    def speedup(self, at_once: int) -> float:
        """Over as many requests one after another."""
        return at_once * self.seconds[1] / self.seconds[at_once]


@dataclass(frozen=True, kw_only=True)
class TenantsRow:
    """Some clients at once, of one model at its freeze."""

    model: str
    clients: int
    makespan: float
    """Seconds until the last had everything."""
    mean: float
    """Seconds of a client's job on average."""
    samples: int
    """Samples of each client."""


def measure_concurrency(
    bed: Bed, settings: ConcurrencySettings, results: Results, tell: Callable[[str], None]
) -> None:
    """Measure the models that ``results`` does not hold."""
    done = {r["model"] for r in results.records if r["kind"] == "tenants"}
    todo = [model for model in settings.models if model not in done]
    tell(f"{len(settings.models)} models, {len(todo)} to measure")
    if not todo:
        return
    with bed, tempfile.TemporaryDirectory(prefix="hapi-concurrency-") as folder:
        bench = _Bench(bed, Path(folder), settings)
        for model in todo:
            requests, tenants = bench.measure(model)
            for record in requests:
                results.add({"kind": "requests", "model": model, **record})
            results.add({"kind": "tenants", "model": model, **tenants})
            tell(f"{model}: done")


class _Bench:
    """A server and the clients, kept from model to model."""

    def __init__(self, bed: Bed, folder: Path, settings: ConcurrencySettings) -> None:
        self._bed, self._settings = bed, settings
        token = secrets.token_hex(16)
        samples = settings.request_size * max(_TENANT_REQUESTS, *AT_ONCE)
        store = make_store(folder, samples, settings.image_size, ("images",))
        flags = ("--max-running", str(max(AT_ONCE)))
        self._url = start_server(bed, store, token, folder, flags, device=settings.device)
        self._clients = [BenchClient(bed, token, folder, f"client-{i}") for i in range(max(TENANTS))]

    def measure(self, model: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(a record for each split, the clients' record)."""
        self._bed.set_bandwidth(None)
        opened = [self._open(client, model) for client in self._clients]
        self._bed.set_bandwidth(self._settings.bandwidth)
        splits = chosen_splits(opened[0]["splits"])
        return [self._requests(split) for split in splits], self._tenants(opened[0]["freeze"])

    def _open(self, client: BenchClient, model: str) -> dict[str, Any]:
        settings = self._settings
        return client.call(
            "open",
            server=[self._url],
            dataset="images",
            model=model,
            weights="random",
            bs=settings.request_size * max(AT_ONCE),
            request_size=settings.request_size,
            split="auto",
            threads=1,
            device=settings.device,
        )

    def _requests(self, split: int) -> dict[str, Any]:
        client, size = self._clients[0], self._settings.request_size
        client.call("fetch", split=split, samples=size, at_once=1)  # the server loads these layers
        seconds: dict[int, list[float]] = {at_once: [] for at_once in AT_ONCE}
        nbytes = 0
        for _ in range(self._settings.repeats):
            for at_once in AT_ONCE:
                found = client.call("fetch", split=split, samples=at_once * size, at_once=at_once)
                seconds[at_once].append(found["seconds"])
                nbytes = found["bytes"] // at_once
        return {"split": split, "request_bytes": nbytes, "seconds": seconds}

    def _tenants(self, freeze: int) -> dict[str, Any]:
        samples = self._settings.request_size * _TENANT_REQUESTS
        self._clients[0].call("fetch", split=freeze, samples=self._settings.request_size, at_once=1)
        seconds: dict[int, list[list[float]]] = {count: [] for count in TENANTS}
        for _ in range(self._settings.repeats):
            for count in TENANTS:
                if isinstance(self._bed, LooseBed):  # each client has a limiter of its own there
                    self._bed.set_bandwidth(self._settings.bandwidth / count)
                with ThreadPoolExecutor(count) as threads:
                    answers = threads.map(
                        lambda client: client.call(
                            "fetch", split=freeze, samples=samples, at_once=max(AT_ONCE)
                        ),
                        self._clients[:count],
                    )
                    seconds[count].append([answer["seconds"] for answer in answers])
        return {"split": freeze, "samples": samples, "seconds": seconds}


def chosen_splits(candidate_splits: Sequence[int]) -> list[int]:
    """Four splits spread over those that push something down, the first and the last among them."""
    last = candidate_splits[-1]
    return sorted(
        {max(1, round(1 + i * (last - 1) / (SPLITS - 1))) for i in range(SPLITS)} - {0} if last else {0}
    )


def request_rows(records: Sequence[Mapping[str, Any]]) -> list[ConcurrencyRow]:
    """Return the rows of a results file; the last of each split."""
    rows = {}
    for r in records:
        if r["kind"] == "requests":
            seconds = {int(count): statistics.median(times) for count, times in r["seconds"].items()}
            rows[r["model"], r["split"]] = ConcurrencyRow(
                model=r["model"], split=r["split"], request_bytes=r["request_bytes"], seconds=seconds
            )
    return list(rows.values())


def tenant_rows(records: Sequence[Mapping[str, Any]]) -> list[TenantsRow]:
    """Return the rows of a results file; the last of each model."""
    rows = {}
    for r in records:
        for count, runs in r["seconds"].items() if r["kind"] == "tenants" else ():
            rows[r["model"], int(count)] = TenantsRow(
                model=r["model"],
                clients=int(count),
                makespan=statistics.median(max(run) for run in runs),
                mean=statistics.median(statistics.mean(run) for run in runs),
                samples=r["samples"],
            )
    return list(rows.values())


def concurrency_table(
    requests: Sequence[ConcurrencyRow], tenants: Sequence[TenantsRow], settings: ConcurrencySettings
) -> list[str]:
    """Both parts as lines for a person."""
    link = format_bandwidth(settings.bandwidth)
    head = f"{'model':<13}{'split':>6}{'request':>12}{'one alone':>11}" + "".join(
        f"{f'{count} at once':>12}" for count in AT_ONCE[1:]
    )
    lines = [f"requests of {settings.request_size} samples at {link}: speed-up over one after another", head]
    for row in requests:
        ups = "".join(f"{row.speedup(count):>12.2f}" for count in AT_ONCE[1:])
        size = format_bytes(row.request_bytes)
        lines.append(f"{row.model:<13}{row.split:>6}{size:>12}{row.seconds[1]:>9.3f} s{ups}")
    lines.append(
        "the paper (Figure 14): the speed-up drops as the split grows, since forward passes take turns on one GPU;"
    )
    lines.append("largest where the forward pass is short and the output large (AlexNet, the first of VGG)")
    if tenants:
        lines += [
            "",
            "clients at once, each for the same epoch at the freeze, nothing computed on their side",
        ]
        lines.append(
            f"{'model':<13}{'clients':>8}{'makespan':>11}{'mean job':>11}{'samples/s':>11}{'of one':>9}"
        )
        alone = {row.model: row.samples / row.makespan for row in tenants if row.clients == 1}
        for tenant in tenants:
            rate = tenant.clients * tenant.samples / tenant.makespan
            lines.append(
                f"{tenant.model:<13}{tenant.clients:>8}{tenant.makespan:>9.2f} s{tenant.mean:>9.2f} s{rate:>11.1f}"
                f"{rate / alone[tenant.model]:>9.2f}"
            )
        lines.append(
            "the earlier text (Figure 11, two T4s): the mean job of 6 tenants takes 1.7 times that of 2"
        )
    return lines
