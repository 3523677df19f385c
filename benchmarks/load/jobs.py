"""``benchmarks jobs``: several jobs of one frozen prefix over one server, against one of them alone.

A real server process with a feature cache, and a session over a socket for each job, in threads of this process: their
orders of samples differ, and the step is a pause. The server's own counters tell how many samples it computed.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import start_server_process
from hapi.client.session import Session
from hapi.config.settings import load
from hapi.train.settings import TrainSettings

MOST_PASSES, MOST_MAKESPAN, MOST_SLOWER = 1.02, 1.15, 1.05
"""Goals: forward samples over one pass, makespan over one job's, and a job of its own speed over the same alone."""


_opening = threading.Lock()
"""Random weights come from one generator in this process."""


@dataclass(frozen=True, kw_only=True)
class JobsSettings:
    """Jobs to run."""

    model: str = "resnet18"
    freeze: int = 11
    samples: int = 512
    image_size: int = 64
    bs: int = 64
    jobs: int = 8
    epochs: int = 30
    pauses: Sequence[float] = (0.05, 0.1, 0.2)
    """Seconds of a step of the jobs of different speed."""
    step: float = 0.02
    """Seconds of a step of equal jobs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Jobs that ran side by side over a server of their own."""

    seconds: Sequence[float]
    """Duration of each job, from their common start."""
    computed: int
    """Samples of the server's forward passes."""
    shared: int
    """Samples that came from other requests or from what was kept."""
    sent_bytes: int

    @property
    def makespan(self) -> float:
        """Seconds until the last job had ended."""
        return max(self.seconds)


@dataclass(frozen=True, kw_only=True)
class JobsResult:
    """What was measured."""

    settings: JobsSettings
    alone: Run
    together: Run
    paused_alone: Sequence[Run]
    """One for each pause."""
    paused_together: Run
    conditions: dict[str, Any]

    def figures(self) -> dict[str, float]:
        """The figures that have goals."""
        pairs = zip(self.paused_together.seconds, self.paused_alone, strict=True)
        return {
            "passes": self.together.computed / self.settings.samples,
            "makespan": self.together.makespan / self.alone.makespan,
            "slower": max(seconds / alone.makespan for seconds, alone in pairs),
        }

    def table(self) -> list[str]:
        """Lines for a person."""
        found, settings = self.figures(), self.settings
        goals = {"passes": MOST_PASSES, "makespan": MOST_MAKESPAN, "slower": MOST_SLOWER}
        lines = [
            (
                f"{settings.jobs} jobs, {settings.epochs} epochs of {settings.samples} samples, {settings.model} "
                f"frozen to layer {settings.freeze}, {settings.image_size} px, batches of {settings.bs}"
            ),
            f"{'run':<18} {'jobs':>5} {'seconds':>9} {'computed':>9} {'shared':>9} {'MB sent':>9}",
        ]
        pauses = [f"step {pause:g} s alone" for pause in settings.pauses]
        names = ["alone", "together", *pauses, "three speeds"]
        runs = [self.alone, self.together, *self.paused_alone, self.paused_together]
        lines += [
            f"{name:<18} {len(run.seconds):>5} {run.makespan:>9.2f} {run.computed:>9} {run.shared:>9} "
            f"{run.sent_bytes / 1e6:>9.1f}"
            for name, run in zip(names, runs, strict=True)
        ]
        texts = {
            "passes": "forward samples over one pass",
            "makespan": "makespan over one job's",
            "slower": "slowest of three speeds over alone",
        }
        lines += [
            f"{texts[name]}: {value:.3f} (goal {goals[name]:g}: {'met' if value <= goals[name] else 'missed'})"
            for name, value in found.items()
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {"benchmark": "jobs", **asdict(self), "figures": self.figures()}


def measure_jobs(settings: JobsSettings, tell: Callable[[str], None]) -> JobsResult:
    """Run one job, all jobs, each of the different speeds, and those together, each over a fresh server."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LooseBed("several jobs of one process need no link") as bed,
    ):
        store = make_store(Path(folder), settings.samples, settings.image_size, ("images",))

        def run(name: str, pauses: Sequence[float]) -> Run:
            """Run a job for each of ``pauses``."""
            tell(f"{name}: {len(pauses)} jobs")
            place = Path(folder) / re.sub(r"\W", "-", name)
            place.mkdir()
            return _run(bed, store, place, settings, pauses)

        return JobsResult(
            settings=settings,
            alone=run("alone", [settings.step]),
            together=run("together", [settings.step] * settings.jobs),
            paused_alone=[run(f"step {pause}", [pause]) for pause in settings.pauses],
            paused_together=run("three speeds", settings.pauses),
            conditions={**conditions(), "test_bed": bed.describe()},
        )


def _run(bed: LooseBed, store: Path, folder: Path, settings: JobsSettings, pauses: Sequence[float]) -> Run:
    token = secrets.token_hex(16)
    flags = [
        *("--cache-dir", str(folder / "cache"), "--share-memory", "256MiB"),
        *("--max-running", str(max(4, len(pauses)))),
    ]
    server, url = start_server_process(bed, store, token, folder, flags)
    try:
        start = threading.Barrier(len(pauses))
        with ThreadPoolExecutor(len(pauses)) as pool:
            seconds = list(
                pool.map(lambda job: _job(url, token, settings, job[0], job[1], start), enumerate(pauses))
            )
        counts = _counts(url, token)
    finally:
        server.terminate()
        server.wait()
    return Run(
        seconds=seconds,
        computed=int(counts["computed"]),
        shared=int(counts["joined"] + counts["recent"] + counts["cache"]),
        sent_bytes=int(counts["sent"]),
    )


def _job(
    url: str, token: str, settings: JobsSettings, seed: int, pause: float, start: threading.Barrier
) -> float:
    """Seconds of one job, its session's opening left out."""
    chosen = {
        "server": [url], "dataset": "images", "model": settings.model, "weights": "random:0", "freeze": settings.freeze,
        "split": "freeze", "bs": settings.bs, "seed": seed, "threads": 1, "cache": "off",
        "image_size": settings.image_size,
    }  # fmt: skip
    with _opening:
        opened = Session.open(load(TrainSettings, None, chosen).value, token=token)
    with opened as session:
        start.wait()
        began = time.monotonic()
        for epoch in range(settings.epochs):
            for _ in session.epoch(epoch):
                time.sleep(pause)
        return time.monotonic() - began


def _counts(url: str, token: str) -> dict[str, float]:
    """The server's counters: samples by source, and bytes sent."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r'^hapi_feature_samples_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    sent = re.findall(r"^hapi_sent_bytes_total (\S+)$", text, re.MULTILINE)
    return {**{source: float(value) for source, value in found}, "sent": float(sent[0])}
