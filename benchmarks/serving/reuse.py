"""``benchmarks reuse``: the gain of keeping a model loaded between requests (later HAPI text, Figure 12,
Table 4).

Two real servers over one store, one that keeps layers and one that loads them for every request, as the paper
does by default. For each model a client plans with each of them, since the split may differ, and runs epochs
at the chosen splits in turns. The loading share of a request is the server's own account. Models are pushed
into the store, so that loading reads the weights of the requested layers, and nothing else.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.settings import StudySettings
from benchmarks.split import paper
from benchmarks.testbed.bed import Bed
from benchmarks.testbed.cells import Results
from benchmarks.testbed.photos import make_store, push_model
from benchmarks.testbed.tiers import BenchClient, start_server
from hapi.units import format_bandwidth

KEPT, LOADED = "kept", "loaded"
_NOT_PROCESSING = frozenset(("queue", "send"))
"""Stages of a request that are waiting or the network's."""


@dataclass(frozen=True, kw_only=True)
class ReuseSettings(StudySettings):
    """Measurements to take, in epochs of a few batches."""

    bs: int = 128
    """The paper's, for its Table 4."""
    bandwidth: float = 40e6
    """Bits per second."""
    request_size: int = 16
    epoch_batches: int = 3


@dataclass(frozen=True, kw_only=True)
class ReuseRow:
    """One model."""

    model: str
    kept_split: int
    loaded_split: int
    kept_seconds: float
    loaded_seconds: float
    """Medians of an epoch."""
    load_split: int
    """The split at which the two figures below were taken: the chosen one, or the freeze where that is 0."""
    load_seconds: float
    """Seconds of a request to load its layers."""
    request_seconds: float
    """Seconds of a request on the server, without waiting and sending."""

    @property
    def speedup(self) -> float:
        """Return the speedup by keeping the layers."""
        return self.loaded_seconds / self.kept_seconds

    @property
    def load_share(self) -> float:
        """Return the part of a request's seconds that loads its layers."""
        return self.load_seconds / self.request_seconds if self.request_seconds else 0.0


def measure_reuse(bed: Bed, settings: ReuseSettings, results: Results, tell: Callable[[str], None]) -> None:
    """Measure the models that ``results`` does not hold, a record each."""
    done = {row.model for row in reuse_rows(results.records)}
    todo = [model for model in settings.models if model not in done]
    tell(f"{len(settings.models)} models, {len(todo)} to measure")
    if not todo:
        return
    with bed, tempfile.TemporaryDirectory(prefix="hapi-reuse-") as folder:
        bench = _Bench(bed, Path(folder), settings)
        for model in todo:
            record = bench.measure(model)
            results.add({"kind": "reuse", **record})
            row = reuse_rows([{"kind": "reuse", **record}])[0]
            tell(f"{model}: {row.speedup:.2f} times as fast when layers are kept")


class _Bench:
    """Both servers and a client for each, kept from model to model."""

    def __init__(self, bed: Bed, folder: Path, settings: ReuseSettings) -> None:
        self._bed, self._settings = bed, settings
        self._samples = settings.bs * settings.epoch_batches
        token = secrets.token_hex(16)
        self._store = make_store(folder, self._samples, settings.image_size, ("images",))
        self._urls: dict[str, str] = {}
        self._clients: dict[str, BenchClient] = {}
        for name, flags in ((KEPT, ()), (LOADED, ("--no-model-reuse",))):
            self._urls[name] = start_server(
                bed, self._store, token, folder, flags, device=settings.device, name=f"server-{name}"
            )
            self._clients[name] = BenchClient(bed, token, folder, f"client-{name}")

    def measure(self, model: str) -> dict[str, Any]:
        """The record of one model: what both servers' epochs and single requests took."""
        settings, samples = self._settings, self._samples
        push_model(self._store, model, settings.image_size)
        self._bed.set_bandwidth(None)  # weights are fetched over the link, once
        freeze = {name: self._open(name, model)["freeze"] for name in self._clients}
        self._bed.set_bandwidth(settings.bandwidth)
        splits = {
            name: client.call("plan", samples=samples, epoch=0)["choices"]["auto"]
            for name, client in self._clients.items()
        }
        runs: dict[str, list[dict[str, Any]]] = {KEPT: [], LOADED: []}
        for round_index in range(settings.repeats + 1):
            for name, client in self._clients.items():
                found = client.call("epoch", split=splits[name], samples=samples, epoch=1, limit=None)
                if round_index:  # the first one loads the layers of this split where they are kept
                    runs[name].append(found)
        last, load_split = runs[LOADED][-1], splits[LOADED]
        if not load_split:
            load_split = freeze[LOADED]
            last = self._clients[LOADED].call("epoch", split=load_split, samples=samples, epoch=1, limit=None)
        return {
            "model": model,
            "splits": splits,
            "seconds": {name: [run["seconds"] for run in found] for name, found in runs.items()},
            "load_split": load_split,
            "stages": last["stages"],
            "requests": last["requests"],
        }

    def _open(self, name: str, model: str) -> dict[str, Any]:
        settings = self._settings
        return self._clients[name].call(
            "open",
            server=[self._urls[name]],
            dataset="images",
            model=f"store:{model}",
            bs=settings.bs,
            request_size=settings.request_size,
            split="auto",
            threads=1,
            device=settings.device,
            replan="off",
            alternate="off",
        )


def reuse_rows(records: Sequence[Mapping[str, Any]]) -> list[ReuseRow]:
    """The rows of a results file, the last of each model."""
    rows = {}
    for r in records:
        if r["kind"] != "reuse":
            continue
        working = sum(seconds for stage, seconds in r["stages"].items() if stage not in _NOT_PROCESSING)
        rows[r["model"]] = ReuseRow(
            model=r["model"],
            kept_split=r["splits"][KEPT],
            loaded_split=r["splits"][LOADED],
            kept_seconds=statistics.median(r["seconds"][KEPT]),
            loaded_seconds=statistics.median(r["seconds"][LOADED]),
            load_split=r["load_split"],
            load_seconds=r["stages"].get("model", 0.0) / r["requests"],
            request_seconds=working / r["requests"],
        )
    return list(rows.values())


def reuse_table(rows: Sequence[ReuseRow], settings: ReuseSettings) -> list[str]:
    """The rows as lines for a person, the paper's Table 4 beside ours."""
    link = format_bandwidth(settings.bandwidth)
    lines = [
        f"epochs of batch {settings.bs} at {link}, layers kept or loaded for every request: seconds @split"
    ]
    head = f"{'model':<13}{'kept':>12}{'loaded':>12}{'speed-up':>10}"
    lines.append(f"{head}   {'request at':<12}{'load s':>9}{'all s':>9}{'load %':>8}{'paper %':>9}")
    for row in rows:
        theirs = paper.MODEL_LOAD.get(row.model)
        percent = "" if theirs is None else f"{100 * theirs[0] / theirs[1]:.0f}"
        epochs = (
            f"{row.kept_seconds:.2f} @{row.kept_split:<2}",
            f"{row.loaded_seconds:.2f} @{row.loaded_split:<2}",
        )
        request = (
            f"{row.load_seconds:>9.3f}{row.request_seconds:>9.3f}{100 * row.load_share:>8.0f}{percent:>9}"
        )
        lines.append(
            f"{row.model:<13}{epochs[0]:>12}{epochs[1]:>12}{row.speedup:>10.2f}   split {row.load_split:<6}{request}"
        )
    lines.append(
        f"a request here is {settings.request_size} samples of {settings.image_size}x{settings.image_size} "
        "(the paper: 128 of 224x224 on a T4, Table 4); its wall seconds beside others count"
    )
    return lines


def change_table(before: Sequence[ReuseRow], rows: Sequence[ReuseRow]) -> list[str]:
    """Return the loading of the same models by other code beside that of ``rows``, with the splits that were chosen.

    Args:
        before: measured with the code before.
        rows: measured with this code.
    """
    lines = [
        f"{'loaded for every request':<26}{'load s':>15}{'load %':>12}{'chosen split':>16}{'epoch s':>16}"
    ]
    earlier = {row.model: row for row in before}
    for now in rows:
        then = earlier.get(now.model)
        if then is not None:
            loads = f"{then.load_seconds:.3f} > {now.load_seconds:.3f}"
            shares = f"{100 * then.load_share:.0f} > {100 * now.load_share:.0f}"
            splits = f"{then.loaded_split} > {now.loaded_split}"
            epochs = f"{then.loaded_seconds:.2f} > {now.loaded_seconds:.2f}"
            lines.append(f"  {now.model:<24}{loads:>15}{shares:>12}{splits:>16}{epochs:>16}")
    return lines
