"""Drawn jobs are run, disturbed, and compared with the plainest training of the same."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hapi.cache.folder import MARKER
from hapi.cache.key_file import KEY_FILE
from support.forked import ROOT, ForkedProcess, environment
from support.harness import ServerProcess, hapi, losses, report_of, wait_for
from support.joint_training import ForkedRanks
from support.random_jobs import Job

PLAINLY = (
    "--split", "none", "--cache", "off", "--offload", "off", "--wire-codec", "none", "--alternate", "off", "--replan",
    "off",
)  # fmt: skip
"""The way of the truth: all in the trainer, which starts a server of its own for the stored samples."""
LONGEST = 400.0
"""Seconds after which a training counts as hung."""
WEIGHTS = 100
"""Trained weights may differ by so many times what losses may: relative, by the norm of each tensor."""
KEPT = {"checkpoint.pt", "model.safetensors", "best.safetensors", "report.json", "log.txt", "checkpoint.pt.1"}
"""Files of a run folder."""


class Training:
    """A ``hapi-train`` on its way, as one process or several ranks."""

    def __init__(self, flags: tuple[str, ...], ranks: int, folder: Path, env: dict[str, str]) -> None:
        self.flags, command = flags, ["hapi.cli.train", *flags]
        self._files = [tempfile.TemporaryFile("w+", dir=folder) for _ in range(0 if ranks else 2)]  # noqa: SIM115  see wait
        self._ranks = ForkedRanks(ranks, command, folder, **env) if ranks else None
        self._process: Any = self._ranks or ForkedProcess(
            command, cwd=folder, env=environment(**env), stdout=self._files[0], stderr=self._files[1]
        )

    def signal(self, number: int, which: int = 0) -> None:
        """Send it to one of the ranks."""
        if self._ranks is None:
            self._process.send_signal(number)
        elif self._ranks.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end just now
                os.kill(self._ranks.pids[which % len(self._ranks.pids)], number)

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> tuple[int, str, str]:
        """Exit code, output and errors; none of them may be a traceback."""
        try:
            said = self._process.communicate(LONGEST)
        finally:
            if not self.over:
                self._process.send_signal(signal.SIGABRT)
        if self._ranks is None:
            for file in self._files:
                file.seek(0)
            said = tuple(file.read() for file in self._files)
        for text in said:
            assert "Traceback (most recent call last)" not in text, said
        return self._process.poll(), *said


class Runs:
    """A job's folder and servers, and all that is run there."""

    def __init__(self, job: Job, store: Path, folder: Path) -> None:
        self.job, self.store, self.folder = job, store, folder
        self.random = random.Random(job.seed + 1)
        self.servers: list[ServerProcess] = []
        self.mark = f"random-job-{os.getpid()}-{job.seed}"
        for name in ("tmp", "home"):
            (folder / name).mkdir()
        self.env = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "TMPDIR": str(folder / "tmp"),
            "XDG_CACHE_HOME": str(folder / "home"),
            "RANDOM_JOB": self.mark,
        }

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """The job's servers, of which each is ended whatever happens."""
        try:
            env: dict[str, Any] = self.env
            for number, flags in enumerate(self.job.servers):
                cache = ("--cache-dir", str(self.folder / "kept")) if self.job.server_cache else ()
                log = self.folder / f"server{number}.log"
                self.servers.append(ServerProcess(self.store, *flags, *cache, log=log, **env))
            yield
        finally:
            for server in self.servers:
                server.kill()

    def start(self, output: str, *more: str, plainly: bool = False) -> Training:
        """Begin a training by the truth's flags, and the way's unless ``plainly``."""
        if plainly:
            return Training(
                (*self.job.truth, *PLAINLY, "--store", str(self.store), "--output", output, *more),
                0,
                self.folder,
                self.env,
            )
        flags = (*self.job.truth, *self.job.way, "--output", output, "--patience", "2min", *more)
        if self.job.way[self.job.way.index("--cache") + 1] != "off":
            flags += ("--cache-dir", str(self.folder / "cache"))
        places = [part for server in self.servers for part in ("--server", server.url)]
        flags += tuple(places) or ("--store", str(self.store))
        return Training(flags, self.job.ranks, self.folder, self.env)

    def some_time(self, longest: float) -> None:
        """Wait for a while; nothing is expected of it."""
        time.sleep(self.random.uniform(0, longest))


def kill(runs: Runs) -> tuple[int, str, str]:
    """SIGKILL of the trainer or a rank once to three times, and on from what it left."""
    return _broken_off(runs, signal.SIGKILL, (-signal.SIGKILL, 0, 1))


def interrupt(runs: Runs) -> tuple[int, str, str]:
    """Ctrl-C, and on."""
    return _broken_off(runs, signal.SIGINT, (130, 0))


def term(runs: Runs) -> tuple[int, str, str]:
    """SIGTERM, and on."""
    return _broken_off(runs, signal.SIGTERM, (130, 0, -signal.SIGTERM))


def _broken_off(runs: Runs, number: int, codes: tuple[int, ...]) -> tuple[int, str, str]:
    kept = runs.folder / "run" / "checkpoint.pt"
    for _ in range(runs.random.randint(1, 3)):
        training = runs.start("run", "--resume")
        if runs.random.random() < 0.3:
            runs.some_time(6)
        else:
            before = kept.stat().st_mtime_ns if kept.exists() else None
            while not training.over and (not kept.exists() or kept.stat().st_mtime_ns == before):
                time.sleep(0.01)
            runs.some_time(1.5)
        training.signal(number, runs.random.randrange(2))
        code, out, errors = training.wait()
        if code not in codes:
            return code, out, errors
    return runs.start("run", "--resume").wait()


def again(runs: Runs) -> tuple[int, str, str]:
    """The same job was run before: its features are there."""
    found = runs.start("before").wait()
    return runs.start("run").wait() if found[0] == 0 else found


def beside(runs: Runs) -> tuple[int, str, str]:
    """Another one beside it, in the same cache."""
    other = runs.start("other")
    found = runs.start("run").wait()
    code, out, errors = other.wait()
    return found if found[0] or not code else (code, out, errors)


def restart(runs: Runs) -> tuple[int, str, str]:
    """Each server is killed, and comes back."""
    training = runs.start("run")
    for number, server in enumerate(runs.servers):
        runs.some_time(6)
        server.kill()
        runs.some_time(2)
        runs.servers[number] = server.restarted()
    return training.wait()


def flip(runs: Runs) -> tuple[int, str, str]:
    """Bits of what is kept are changed, and read; files that say whose it is would end the job by one line."""
    found = runs.start("before").wait()
    if found[0]:
        return found
    for place in ("cache", "kept"):
        files = [
            p
            for p in (runs.folder / place).rglob("*")
            if p.is_file() and p.stat().st_size and p.name not in (MARKER, KEY_FILE)
        ]
        for path in runs.random.sample(files, min(3, len(files))):
            at = runs.random.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << runs.random.randrange(8))]))
    return runs.start("run").wait()


def no_cache(runs: Runs) -> tuple[int, str, str]:
    """The cache's folder is removed while a training fills or reads it."""
    training, place = runs.start("run"), runs.folder / "cache"
    while not training.over and not place.exists():
        time.sleep(0.01)
    for _ in range(runs.random.randint(1, 3)):
        runs.some_time(2)
        shutil.rmtree(place, ignore_errors=True)
    return training.wait()


TROUBLES: dict[str, Callable[[Runs], tuple[int, str, str]]] = {
    "none": lambda runs: runs.start("run").wait(),
    "kill": kill,
    "interrupt": interrupt,
    "term": term,
    "again": again,
    "beside": beside,
    "restart": restart,
    "flip": flip,
    "server flip": flip,
    "no cache": no_cache,
}


def check(job: Job, store: Path, folder: Path) -> str:
    """Run the job and compare it with its truth; how it went, in a word or a line."""
    runs = Runs(job, store, folder)
    code, out, errors = runs.start("truth", plainly=True).wait()
    truth = _refusal(code, out, errors)
    with runs.served():
        code, out, errors = TROUBLES[job.trouble](runs)
        refusal = _refusal(code, out, errors)
        if not runs.servers:
            wait_for(lambda: not marked(runs.mark), 60, "the end of all processes")
    wait_for(lambda: not marked(runs.mark), 60, "the end of all processes")
    if refusal or truth:
        assert refusal, f"the truth was refused, this was not: {truth}"
        return f"refused: {refusal}" if truth else f"refused beside its truth: {refusal}"
    compare(job, folder / "truth", folder / "run")
    _nothing_left(runs)
    return "equal"


def _refusal(code: int, out: str, errors: str) -> str:
    """The one line that says why there was no training; nothing if there was one."""
    if code == 0:
        return ""
    assert code in (1, 2, 3), (code, out, errors)
    lines = [line for line in errors.splitlines() if line.startswith("hapi-train: error: ")]
    assert len(lines) == 1, (code, out, errors)
    return lines[0].removeprefix("hapi-train: error: ")


def compare(job: Job, truth: Path, run: Path) -> None:
    """Raise unless losses, samples and weights are equal, as far as they must be."""
    theirs, ours = report_of(truth / "report.json"), report_of(run / "report.json")
    for name in ("samples", "epoch"):
        assert [e[name] for e in ours["epochs"]] == [e[name] for e in theirs["epochs"]], name
    wanted: Any = losses(theirs)
    if job.tolerance:
        wanted = pytest.approx(wanted, rel=job.tolerance, abs=job.tolerance / 10)
    assert losses(ours) == wanted
    for name in ("model.safetensors",):
        expected, found = load_file(truth / name), load_file(run / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if job.tolerance == 0 or not tensor.is_floating_point():
                assert torch.equal(found[key], tensor), key
            elif job.tolerance < 1e-2:
                distance = (found[key] - tensor).norm() / tensor.norm().clamp_min(1e-3)
                assert distance <= WEIGHTS * job.tolerance, (key, distance)


def marked(mark: str) -> list[int]:
    """Processes that this job's environment came to."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"RANDOM_JOB={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def _nothing_left(runs: Runs) -> None:
    """Raise if files are left that nobody needs, or the cache is damaged without a reason."""
    left = [path for path in (runs.folder / "tmp").rglob("*") if not path.is_dir()]
    assert not left, left
    names = {path.name for path in (runs.folder / "run").iterdir()}
    assert names <= KEPT and KEPT - names <= {"checkpoint.pt.1"}, names
    for place in ("cache", "kept"):
        if (
            (runs.folder / place).is_dir()
            and any((runs.folder / place).iterdir())
            and "flip" not in runs.job.trouble
        ):
            hapi("cache", "verify", str(runs.folder / place))
