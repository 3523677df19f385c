"""``benchmarks jobs``: several jobs of one frozen prefix over one server, against one of them alone.

A real server process with a feature cache, and a session over a socket for each job, in threads of this process: their
orders of samples differ, and the step is a pause, as for a trainer with a device of its own. So jobs side by side share
the server and what this machine needs to receive features, and not the computing of their steps. The server's own
counters tell how many samples it computed. Each turn has every run once, and ratios are of runs of one turn.
"""

from __future__ import annotations

import os
import re
import secrets
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.cells import Results
from benchmarks.testbed.conditions import conditions, recorded_conditions, rotated
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import start_server_process
from hapi.client.session import Session
from hapi.config.settings import load
from hapi.train.settings import TrainSettings

GOALS = {"passes": 1.02, "makespan": 1.15, "slower": 1.05}
"""At most: forward samples over one pass, makespan over one job's, a job of its own speed over the same alone."""
TOGETHER, SPEEDS = "together", "three speeds"
_opening = threading.Lock()
"""Random weights come from one generator in this process."""


@dataclass(frozen=True, kw_only=True)
class JobsSettings:
    """Jobs to run."""

    model: str = "resnet18"
    freeze: int = 11
    samples: int = 2048
    image_size: int = 64
    bs: int = 64
    jobs: int = 8
    epochs: int = 30
    repeats: int = 1
    step: float = 0.05
    """Seconds of a step of equal jobs, and of the fastest of different speed."""

    @property
    def pauses(self) -> tuple[float, ...]:
        """Seconds of a step of the jobs of different speed."""
        return self.step, 2 * self.step, 4 * self.step

    def runs(self) -> dict[str, list[float]]:
        """Pauses of the jobs of each run of a turn, by the run's name."""
        alone = {_alone(pause): [pause] for pause in self.pauses}
        return {**alone, TOGETHER: [self.step] * self.jobs, SPEEDS: list(self.pauses)}

    def measuring(self) -> dict[str, Any]:
        """The settings that decide what is measured, and not how often."""
        return {name: value for name, value in asdict(self).items() if name != "repeats"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Jobs that ran side by side over a server of their own."""

    name: str
    repeat: int
    seconds: Sequence[float]
    """Duration of each job, from their common start."""
    computed: int
    """Samples of the server's forward passes."""
    shared: int
    """Samples that came from other requests or from what was kept."""
    sent_bytes: int
    server_cpu: float
    """CPU seconds of the server."""
    jobs_cpu: float
    """CPU seconds of all jobs."""

    @property
    def makespan(self) -> float:
        """Seconds until the last job had ended."""
        return max(self.seconds)


@dataclass(frozen=True, kw_only=True)
class JobsResult:
    """What was measured."""

    settings: JobsSettings
    runs: Sequence[Run]
    conditions: dict[str, Any]

    def pairs(self) -> list[dict[str, float]]:
        """The figures that have goals, of each turn."""
        by_repeat: dict[int, dict[str, Run]] = {}
        for run in self.runs:
            by_repeat.setdefault(run.repeat, {})[run.name] = run
        settings, found = self.settings, []
        for _, runs in sorted(by_repeat.items()):
            together, speeds = runs[TOGETHER], runs[SPEEDS]
            alone = [runs[_alone(pause)].makespan for pause in settings.pauses]
            found.append(
                {
                    "passes": together.computed / settings.samples,
                    "makespan": together.makespan / alone[0],
                    "slower": max(s / a for s, a in zip(speeds.seconds, alone, strict=True)),
                }
            )
        return found

    def figures(self) -> dict[str, float]:
        """The medians over the turns, and of the passes, which have no noise, the most."""
        pairs = self.pairs()
        medians = {name: statistics.median(pair[name] for pair in pairs) for name in GOALS}
        return {**medians, "passes": max(pair["passes"] for pair in pairs)}

    def table(self) -> list[str]:
        """Lines for a person."""
        settings = self.settings
        lines = [
            (
                f"{settings.jobs} jobs, {settings.epochs} epochs of {settings.samples} samples, {settings.model} "
                f"frozen to layer {settings.freeze}, {settings.image_size} px, batches of {settings.bs}, a step is a "
                f"pause of {settings.step:g} s"
            ),
            (
                f"{'run':<18} {'jobs':>4} {'seconds':>8} {'computed':>8} {'shared':>8} {'MB sent':>8} "
                f"{'server CPU':>10} {'jobs CPU':>9}"
            ),
        ]
        lines += [
            f"{run.name:<18} {len(run.seconds):>4} {run.makespan:>8.2f} {run.computed:>8} {run.shared:>8} "
            f"{run.sent_bytes / 1e6:>8.1f} {run.server_cpu:>8.1f} s {run.jobs_cpu:>7.1f} s"
            for run in self.runs
        ]
        texts = {
            "passes": "forward samples over one pass",
            "makespan": "makespan over one job's",
            "slower": "slowest of three speeds over alone",
        }
        pairs = self.pairs()
        for name, value in self.figures().items():
            each = ", ".join(f"{pair[name]:.3f}" for pair in pairs)
            met = "met" if value <= GOALS[name] else "missed"
            lines.append(f"{texts[name]}: {value:.3f} of {each} (goal {GOALS[name]:g}: {met})")
        return lines

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {"benchmark": "jobs", **asdict(self), "figures": self.figures(), "pairs": self.pairs()}


def measure_jobs(settings: JobsSettings, results: Results, tell: Callable[[str], None]) -> JobsResult:
    """Run what ``results`` does not have yet, turn by turn: one job of each speed alone, equal ones together, and one
    of each speed together, each run over a fresh server."""
    done = {(record["run"]["name"], record["run"]["repeat"]) for record in _of_runs(results)}
    with (
        tempfile.TemporaryDirectory() as folder,
        LooseBed("several jobs of one process need no link") as bed,
    ):
        store: Path | None = None
        for repeat in range(settings.repeats):
            runs = settings.runs()
            for name in rotated(list(runs), repeat):
                if (name, repeat) in done:
                    continue
                store = store or make_store(Path(folder), settings.samples, settings.image_size, ("images",))
                tell(f"repeat {repeat + 1}, {name}: {len(runs[name])} jobs")
                place = Path(folder) / f"{repeat}-{re.sub(r'[^a-z0-9]', '-', name)}"
                place.mkdir()
                run = _run(bed, store, place, settings, name, repeat, runs[name])
                results.add({"kind": "run", "run": asdict(run)})
    return JobsResult(
        settings=settings,
        runs=[Run(**record["run"]) for record in _of_runs(results)],
        conditions=recorded_conditions(results.records),
    )


def head(settings: JobsSettings) -> dict[str, Any]:
    """Conditions of what is measured from now on."""
    bed = LooseBed("several jobs of one process need no link").describe()
    return {**conditions(), "test_bed": bed, "grid": settings.measuring()}


def _of_runs(results: Results) -> list[dict[str, Any]]:
    return [record for record in results.records if record["kind"] == "run"]


def _alone(pause: float) -> str:
    return f"step {pause:g} s alone"


def _run(
    bed: LooseBed,
    store: Path,
    folder: Path,
    settings: JobsSettings,
    name: str,
    repeat: int,
    pauses: Sequence[float],
) -> Run:
    token = secrets.token_hex(16)
    flags = [
        *("--cache-dir", str(folder / "cache"), "--share-memory", "256MiB"),
        *("--max-running", str(max(4, len(pauses)))),
    ]
    server, url = start_server_process(bed, store, token, folder, flags)
    try:
        start = threading.Barrier(len(pauses))
        with ThreadPoolExecutor(len(pauses)) as pool:
            jobs = [
                pool.submit(_job, url, token, settings, seed, pause, start)
                for seed, pause in enumerate(pauses)
            ]
            seconds = [job.result() for job in jobs]
        counts = _counts(url, token)
        server_cpu = _cpu_seconds(server.pid)
    finally:
        server.terminate()
        server.wait()
    return Run(
        name=name,
        repeat=repeat,
        seconds=[round(found.seconds, 4) for found in seconds],
        computed=int(counts["computed"]),
        shared=int(counts["joined"] + counts["recent"] + counts["cache"]),
        sent_bytes=int(counts["sent"]),
        server_cpu=round(server_cpu, 2),
        jobs_cpu=round(
            max(found.ended_cpu for found in seconds) - min(found.began_cpu for found in seconds), 2
        ),
    )


@dataclass(frozen=True)
class _Job:
    """One job's time, and the CPU seconds of this process when it began and ended."""

    seconds: float
    began_cpu: float
    ended_cpu: float


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its ended children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _job(
    url: str, token: str, settings: JobsSettings, seed: int, pause: float, start: threading.Barrier
) -> _Job:
    """One job, its session's opening left out."""
    chosen = {
        "server": [url], "dataset": "images", "model": settings.model, "weights": "random:0", "freeze": settings.freeze,
        "split": "freeze", "bs": settings.bs, "seed": seed, "threads": 1, "cache": "off",
        "image_size": settings.image_size,
    }  # fmt: skip
    with _opening:
        opened = Session.open(load(TrainSettings, None, chosen).value, token=token)
    with opened as session:
        start.wait()
        began, began_cpu = time.monotonic(), time.process_time()
        for epoch in range(settings.epochs):
            for _ in session.epoch(epoch):
                time.sleep(pause)
        return _Job(time.monotonic() - began, began_cpu, time.process_time())


def _counts(url: str, token: str) -> dict[str, float]:
    """The server's counters: samples by source, and bytes sent."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r'^hapi_feature_samples_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    sent = re.findall(r"^hapi_sent_bytes_total (\S+)$", text, re.MULTILINE)
    return {**{source: float(value) for source, value in found}, "sent": float(sent[0])}
