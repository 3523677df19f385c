"""Runs of the benchmark ``epochs``: each way of doing a job, on two tiers with a link between.

Each run has servers of its own, a cache folder of its own, and programs that begin from nothing. A program prints a
line when its job begins and after each epoch; the seconds between the lines, the processor seconds of the server's
side and the bytes of the link at that moment are the record.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.epochs.first_epochs import SAMPLES_ONLY
from benchmarks.epochs.jobs import Job, make_job, why_no_real_job
from benchmarks.epochs.settings import REAL_JOBS, EpochsCell, EpochsSettings, Way, way_of
from benchmarks.testbed.bed import Bed, Side, stop_all
from benchmarks.testbed.cells import Results
from benchmarks.testbed.processes import drop_pages
from benchmarks.testbed.tiers import START_SECONDS, environment, last_line, read_line, start_server_process
from hapi.errors import TransportError
from hapi.units import format_bandwidth, format_duration

RUN_SECONDS = 3600.0
"""Longest run."""
PLAIN = Path(__file__).with_name("plain.py")
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""Environment in which glibc keeps freed memory, as Hapi does for itself: the plain script is twice as fast so."""
_DISK_BYTES = 128 << 20
_TICKS = os.sysconf("SC_CLK_TCK")

Tell = Callable[[str], None]


def measure(bed: Bed, settings: EpochsSettings, results: Results, tell: Tell) -> None:
    """Measure on ``bed`` what ``results`` does not hold of ``settings``.

    Args:
        bed: two network namespaces with a link.
        settings: jobs and sizes.
        results: file of records; each run is added as it ends.
        tell: gets a line after each run.

    Raises:
        UsageError: the bed or the data cannot be made.
        TransportError: a program failed; the last line of its log is the message.
    """
    real = [name for name in settings.models if name in REAL_JOBS]
    reason = why_no_real_job() if real else None
    if reason is not None:
        tell(f"{', '.join(real)} left out: {reason}")
    todo = [run for run in all_runs(settings) if not run.done(results) and not (reason and run.real)]
    tell(f"{len(all_runs(settings))} runs, {len(todo)} to measure")
    if not todo:
        return
    with bed, tempfile.TemporaryDirectory(prefix="hapi-epochs-", dir=settings.folder) as folder:
        bench = _Bench(bed, Path(folder), settings)
        results.add({"kind": "disk", "write_bytes_per_second": disk_rate(Path(folder))})
        began = time.monotonic()
        for number, run in enumerate(todo):
            record = bench.run(run)
            results.add(record)
            left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
            tell(f"{run.text}: {_seconds_of(record)}; about {format_duration(left)} left")


def _seconds_of(record: dict[str, Any]) -> str:
    epochs = " ".join(f"{epoch['seconds']:.1f}" for epoch in record["epochs"])
    return f"start {record['start']:.1f} s, epochs {epochs} s"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one way."""

    cell: EpochsCell
    way: Way
    planned: int
    """Epochs that the program is told."""
    count: int
    """Epochs that are run of them."""
    repeat: int

    @property
    def real(self) -> bool:
        """Return whether it is one of the real job."""
        return self.cell.model in REAL_JOBS

    @property
    def text(self) -> str:
        """The run, for people."""
        cell = f"{self.cell.model} at {format_bandwidth(self.cell.bandwidth)}"
        return f"{cell}, {self.way.title}, {self.count} of {self.planned} epochs"

    def done(self, results: Results) -> bool:
        """Return whether ``results`` has as many epochs of it."""
        return any(
            record["kind"] == "run"
            and (record["cell"], record["way"], record["repeat"])
            == (self.cell.key, self.way.name, self.repeat)
            and (record["planned"] == self.planned or not self.way.by_epochs)
            and len(record["epochs"]) >= self.count
            for record in results.records
        )


def all_runs(settings: EpochsSettings) -> list[Run]:
    """All runs of ``settings``; repeats come last, so that an interrupted measurement has something of all."""
    return [
        Run(
            cell=cell,
            way=way,
            planned=planned,
            count=planned if settings.measured is None else min(planned, settings.measured),
            repeat=repeat,
        )
        for repeat in range(settings.repeats)
        for cell in settings.cells()
        for way in map(way_of, settings.ways)
        for planned in settings.runs(way)
    ]


class _Bench:
    """Both tiers, run after run."""

    def __init__(self, bed: Bed, folder: Path, settings: EpochsSettings) -> None:
        self._bed, self._folder, self._settings = bed, folder, settings
        self._token = secrets.token_hex(16)
        self._jobs: dict[str, Job] = {}

    def run(self, run: Run) -> dict[str, Any]:
        """Do one run and return its record."""
        model = run.cell.model
        if model not in self._jobs:
            self._jobs[model] = make_job(model, self._folder, self._settings)
        job = self._jobs[model]
        self._bed.set_bandwidth(run.cell.bandwidth)
        cache = self._folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        started = self._start_plain if run.way.flags is None else self._start_hapi
        side: Side = "server" if run.way.in_store else "client"
        log = self._folder / "program.log"
        with ExitStack() as stack, log.open("wb") as output:
            server, command = started(run, job, cache, stack)
            began = time.monotonic()
            settings = KEEPS_MEMORY if run.way.flags is None else {}
            program = self._bed.start(
                side,
                command,
                env=environment(self._token) | settings,
                stdout=subprocess.PIPE,
                stderr=output,
            )
            stack.callback(stop_all, [program])
            watched = _Watched(program, server, run.way.in_store, began)
            watched.follow()
        if program.returncode or len(watched.epochs) < run.count:
            raise TransportError(f"{run.text}: the program failed: {last_line(log.read_text())}")
        return {
            "kind": "run", "cell": run.cell.key, "model": model, "bandwidth": run.cell.bandwidth,
            "way": run.way.name, "planned": run.planned, "repeat": run.repeat, "job": job.describe,
            "start": watched.start, "end": watched.end, "epochs": watched.epochs,
        }  # fmt: skip

    def _start_hapi(
        self, run: Run, job: Job, cache: Path, stack: ExitStack
    ) -> tuple[subprocess.Popen[str], list[str]]:
        """(the server, the trainer's command) of a run of Hapi."""
        flags = ("--cos-batch", "16", *job.server_flags)
        server, url = start_server_process(self._bed, job.store, self._token, self._folder, flags)
        stack.callback(stop_all, [server])
        command = [sys.executable, "-m", "benchmarks.epochs.first_epochs", str(run.count)]
        command += [SAMPLES_ONLY] if run.way.samples_only else []
        kept = ("--cache", "auto", "--cache-dir", str(cache)) if run.way.caches else ()
        arguments = (f"--server={url}", f"--epochs={run.planned}", *job.flags, *kept, *(run.way.flags or ()))
        return server, [*command, *arguments]

    def _start_plain(
        self, run: Run, job: Job, cache: Path, stack: ExitStack
    ) -> tuple[subprocess.Popen[str], list[str]]:
        """(the server of the images, the command) of a run of the plain script."""
        command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", self._bed.address]
        server = self._bed.start(
            "server",
            [*command, "--directory", str(job.images)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(stop_all, [server])
        line = read_line(server, START_SECONDS)
        if "port" not in line:
            raise TransportError(f"the images' server did not start: {line.strip() or 'it said nothing'}")
        port = int(line.split(" port ")[1].split()[0])
        target = self._folder / "plain.json"
        order = job.plain["order"][: run.count]
        target.write_text(
            json.dumps({**job.plain, "order": order, "url": f"http://{self._bed.address}:{port}"})
        )
        return server, [sys.executable, str(PLAIN), str(target)]


@dataclass
class _Watched:
    """A program that prints a line for each epoch, and what stands beside each line."""

    program: subprocess.Popen[str]
    server: subprocess.Popen[str]
    in_store: bool
    began: float
    start: float = 0.0
    """Seconds from the process's start to its job's."""
    end: float = 0.0
    """Seconds from the last epoch to the process's end."""
    epochs: list[dict[str, Any]] = field(default_factory=list)

    def follow(self) -> None:
        """Read its lines until it ends; a run that takes too long is killed."""
        killer = threading.Timer(RUN_SECONDS, self.program.kill)
        killer.start()
        try:
            before, busy, sent = self.began, self._busy(), self._sent()
            for line in self.program.stdout or ():
                now, said = time.monotonic(), json.loads(line)
                if "epoch" not in said:
                    self.start, before = now - self.began, now
                    continue
                now_busy, now_sent = self._busy(), self._sent()
                self.epochs.append(
                    {
                        **said,
                        "seconds": round(now - before, 4),
                        "server_cpu": round(now_busy - busy, 3),
                        "bytes": now_sent - sent,
                    }
                )
                before, busy, sent = now, now_busy, now_sent
            self.program.wait()
            self.end = time.monotonic() - before
        finally:
            killer.cancel()

    def _busy(self) -> float:
        """Processor seconds of the server's side so far."""
        return cpu_seconds(self.server.pid) + (cpu_seconds(self.program.pid) if self.in_store else 0.0)

    def _sent(self) -> int:
        """Bytes that the server's side has put on the link so far."""
        return link_bytes(Path(f"/proc/{self.server.pid}/net/dev"))


def link_bytes(table: Path) -> int:
    """Return the bytes that went out by all links but the loopback, as the kernel counts them, headers included.

    Args:
        table: ``net/dev`` of a process; 0 is returned when it has ended.
    """
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    links = (line.split(":", 1) for line in lines if ":" in line)
    return sum(int(counters.split()[8]) for name, counters in links if name.strip() != "lo")


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and of all that it started; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    except OSError:
        return 0.0
    return sum(map(int, fields.split()[11:15])) / _TICKS + sum(map(cpu_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    try:
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.read_text(encoding="ascii").split()]
    except OSError:  # it has ended, or the kernel does not tell
        return []


def disk_rate(folder: Path, nbytes: int = _DISK_BYTES) -> float:
    """Return the bytes a second at which a file of ``nbytes`` is written into ``folder`` and through to the disk."""
    path, block = folder / "disk", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(nbytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    drop_pages(path)
    path.unlink()
    return nbytes / seconds
