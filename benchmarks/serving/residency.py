"""Resident memory of several jobs on one backbone, as threads and as processes, and the wait of the second one.

A model is pushed into a store; each job takes its frozen layers from there, and reads every byte of them. Memory is the
proportional set size (PSS: a page that n mappings share counts a n-th for each) of all processes, by how much it grew
since their layers were there without weights, and the part of it that is mappings of shared weights. The same without
sharing is beside it. Jobs take their weights one after the other, those of one process each in a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.bed import stop_all
from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.tiers import environment
from hapi.errors import HapiError, UsageError
from hapi.models.shared.place import FOLDER_VARIABLE, MEMORY, VARIABLE
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze
from hapi.repository.push import push
from hapi.store.open import open_store

MEMORY_GOAL, SECONDS_GOAL = 1.05, 0.010
"""Most memory of all jobs over that of one, and most seconds of a second job's taking."""
_NAME = "backbone"


@dataclass(frozen=True, kw_only=True)
class ResidencySettings:
    """Measurements to take."""

    models: tuple[str, ...] = ("resnet50", "vit_b_16")
    jobs: int = 8
    image_size: int = 224


@dataclass(frozen=True, kw_only=True)
class ResidencyRow:
    """Jobs on one backbone."""

    model: str
    way: str
    """``threads`` or ``processes``."""
    shared: bool
    jobs: int
    backbone_bytes: int
    mapped_bytes: int
    """PSS of mappings of shared weights, of all processes."""
    grown_bytes: int
    """Growth of the PSS of all processes."""
    first_seconds: float
    """Seconds in which the first job took the backbone."""
    first_read_bytes: int
    later_seconds: tuple[float, ...]
    """Seconds of each further one."""
    later_cpu_seconds: tuple[float, ...]
    """Processor seconds of its thread, which other work on the machine disturbs less."""
    later_read_bytes: int
    """Bytes that all further ones read."""


@dataclass(frozen=True, kw_only=True)
class ResidencyResult:
    """All rows."""

    rows: tuple[ResidencyRow, ...]
    conditions: dict[str, Any]

    def ratios(self) -> list[tuple[ResidencyRow, float, float]]:
        """Each row of several jobs, with its mapped and its grown memory over those of one job alike."""
        one = {(r.model, r.shared): r for r in self.rows if r.jobs == 1}
        found = []
        for row in self.rows:
            if row.jobs > 1:
                base = one[row.model, row.shared]
                mapped = row.mapped_bytes / base.mapped_bytes if base.mapped_bytes else 0.0
                found.append((row, mapped, row.grown_bytes / base.grown_bytes))
        return found

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        memory = f"{'weights':>8} {'grown':>8}"
        head = f"{'model':10} {'jobs':>4} {'as':9} {'shared':6} {memory} {'first job':>10} {'read':>7}"
        lines = [f"{head} {'later jobs':>29} {'read':>7}   (MB; ms: median, largest, processor's median)"]
        lines += [_line(row) for row in self.rows]
        lines += ["", f"over one job (the goal is {MEMORY_GOAL}), weights and growth of all memory:"]
        for row, mapped, grown in self.ratios():
            kept = f"{mapped:6.3f}" if row.shared else "      "
            lines.append(f"{row.model:10} {row.jobs:4} {row.way:9} {_yes(row.shared):6} {kept} {grown:6.3f}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a document."""
        goals = {"memory": MEMORY_GOAL, "seconds": SECONDS_GOAL}
        over_one = [
            {"model": r.model, "way": r.way, "shared": r.shared, "weights": mapped, "grown": grown}
            for r, mapped, grown in self.ratios()
        ]
        return {
            "benchmark": "residency", "goals": goals, "conditions": self.conditions,
            "rows": [asdict(row) for row in self.rows], "over_one": over_one,
        }  # fmt: skip


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _line(row: ResidencyRow) -> str:
    later, read = "", ""
    if row.later_seconds:
        median, largest = statistics.median(row.later_seconds) * 1e3, max(row.later_seconds) * 1e3
        cpu = statistics.median(row.later_cpu_seconds) * 1e3
        later, read = f"{median:9.1f} {largest:9.1f} {cpu:9.1f}", f"{row.later_read_bytes / 1e6:7.1f}"
    memory = f"{row.mapped_bytes / 1e6:8.1f} {row.grown_bytes / 1e6:8.1f}"
    first = f"{row.first_seconds * 1e3:10.1f} {row.first_read_bytes / 1e6:7.1f}"
    return (
        f"{row.model:10} {row.jobs:4} {row.way:9} {_yes(row.shared):6} {memory} {first} {later:>29} {read:>7}"
    )


def measure_residency(settings: ResidencySettings, say: Callable[[str], None]) -> ResidencyResult:
    """Measure all models; :class:`UsageError` where the system does not tell proportional memory."""
    if not Path("/proc/self/smaps_rollup").exists() or not MEMORY.is_dir():
        raise UsageError(
            "this system does not tell proportional memory; python -m benchmarks residency needs Linux"
        )
    rows = []
    found = {**conditions(), "jobs": settings.jobs, "image_size": settings.image_size, "threads": 1}
    for model in settings.models:
        with tempfile.TemporaryDirectory() as store:
            freeze = _push(model, settings.image_size, store)
            for shared in (True, False):
                for way, jobs in (("processes", 1), ("processes", settings.jobs), ("threads", settings.jobs)):
                    rows.append(_measured(store, model, freeze, way, shared, jobs))
                    say(_line(rows[-1]))
    return ResidencyResult(rows=tuple(rows), conditions=found)


def _push(model: str, side: int, store: str) -> int:
    spec = ModelSpec(architecture=model, weights="random:0", input_shape=(3, side, side))
    layered = build(spec)
    push(open_store(store), _NAME, layered, spec)
    return choose_freeze(layered, None)


def _measured(store: str, model: str, freeze: int, way: str, shared: bool, jobs: int) -> ResidencyRow:
    processes, each = (1, jobs) if way == "threads" else (jobs, 1)
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        folder = Path(memory) / "weights"
        with _started(store, freeze, processes, each, folder if shared else None) as started:
            before = sum(_rollup(process.pid) for process in started)
            answers = [_answer(process) for process in started for _ in range(each)]
            grown = sum(_rollup(process.pid) for process in started) - before
            mapped = sum(_mapped(process.pid, folder) for process in started)
    if len({answer["content"] for answer in answers}) > 1:
        raise HapiError("the jobs have different weights")
    first, *later = answers
    return ResidencyRow(
        model=model, way=way, shared=shared, jobs=jobs, backbone_bytes=first["nbytes"],
        mapped_bytes=mapped, grown_bytes=grown,
        first_seconds=first["seconds"], first_read_bytes=first["read_bytes"],
        later_seconds=tuple(answer["seconds"] for answer in later),
        later_cpu_seconds=tuple(answer["cpu_seconds"] for answer in later),
        later_read_bytes=sum(answer["read_bytes"] for answer in later),
    )  # fmt: skip


@contextlib.contextmanager
def _started(
    store: str, freeze: int, processes: int, each: int, folder: Path | None
) -> Iterator[list[subprocess.Popen[str]]]:
    env = environment("") | {VARIABLE: "off" if folder is None else "on", FOLDER_VARIABLE: str(folder or "")}
    command = [sys.executable, "-m", "benchmarks.serving.residency_job", store, _NAME, str(freeze), str(each)]
    started = []
    try:
        for _ in range(processes):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
            started.append(process)
        for process in started:
            if _said(process) != "ready":
                raise HapiError("a job did not begin")
        yield started
    finally:
        stop_all(started)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let the next job of a process take its weights."""
    if process.stdin is not None:
        process.stdin.write("next\n")
        process.stdin.flush()
    text = _said(process)
    if not text:
        raise HapiError("a job ended before it had its weights")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _said(process: subprocess.Popen[str]) -> str:
    return "" if process.stdout is None else process.stdout.readline().strip()


def _rollup(pid: int) -> int:
    """PSS of a process in bytes."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")) * 1024


def _mapped(pid: int, folder: Path) -> int:
    """PSS of a process's mappings of files in ``folder``, in bytes."""
    text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    return sum(_kilobytes(part) for part in parts if f" {folder}/" in part.partition("\n")[0]) * 1024


def _kilobytes(text: str) -> int:
    found = re.search(r"^Pss: +(\d+) kB", text, flags=re.MULTILINE)
    return 0 if found is None else int(found[1])
