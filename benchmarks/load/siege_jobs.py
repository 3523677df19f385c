"""The training jobs of ``benchmarks siege``: each is trained again and again, and its losses are compared."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.background import Background
from benchmarks.testbed.bed import Bed
from benchmarks.testbed.tiers import environment, last_line

ROOM_BYTES = 128 << 20
KILLS_OF_A_ROUND = 2
KILL_SECONDS = (6.0, 14.0)
"""Shortest and longest time after which a trainer is killed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tenant's training, over and over."""

    name: str
    token: str
    flags: Sequence[str]
    checkpoints: Path
    """Folder of its checkpoints."""
    killed: bool = False
    """True when its trainer is killed now and then, and goes on from the checkpoint."""


@dataclass
class Rounds:
    """All that came of a job."""

    losses: list[list[float]] = field(default_factory=list)
    """Loss of each epoch, by round that ended well."""
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Last words of trainers that ended otherwise."""
    kills: int = 0
    refused: int = 0
    """Starts that met the full disk."""


class Trainers:
    """Runs jobs on the client's side of a bed."""

    def __init__(self, bed: Bed, folder: Path, url: str) -> None:
        self._bed, self._folder, self._url = bed, folder, url

    def run(self, job: Job, over: threading.Event | None) -> Rounds:
        """Train ``job`` once, or (``over``) in rounds that begin until it is set; the last one is finished."""
        rounds, number = Rounds(), 0
        while not rounds.failures and (number == 0 or (over is not None and not over.is_set())):
            began = time.monotonic()
            losses = self._round(job, number, rounds, killed=job.killed and over is not None)
            if losses is not None:
                rounds.losses.append(losses)
                rounds.seconds.append(time.monotonic() - began)
            number += 1
        return rounds

    def _round(self, job: Job, number: int, rounds: Rounds, *, killed: bool) -> list[float] | None:
        checkpoint = job.checkpoints / f"{job.name}.ckpt"
        report = self._folder / f"{job.name}-{number}.json"
        checkpoint.unlink(missing_ok=True)
        kills = KILLS_OF_A_ROUND if killed else 0
        how = random.Random(number)
        while True:
            _wait_for_room(job.checkpoints)
            log = self._folder / f"{job.name}.log"
            with log.open("ab") as output:
                process = self._start(job, checkpoint, report, output)
                try:
                    code = process.wait(how.uniform(*KILL_SECONDS) if kills else None)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills -= 1
                    rounds.kills += 1
                    continue
            if code and "No space left" in last_line(log.read_text(errors="replace")):
                rounds.refused += (
                    1  # at its start, which a full disk may meet after all: whoever runs it starts it again
                )
                continue
            if code:
                rounds.failures.append(f"exit code {code}: {last_line(log.read_text(errors='replace'))}")
                return None
            document: dict[str, Any] = json.loads(report.read_text())
            for file in checkpoint.parent.glob(f"{checkpoint.name}*"):
                file.unlink(missing_ok=True)
            return [epoch["loss"] for epoch in document["epochs"]]

    def _start(self, job: Job, checkpoint: Path, report: Path, output: Any) -> subprocess.Popen[str]:
        files = (
            "--checkpoint",
            str(checkpoint),
            "--resume",
            "--checkpoint-every",
            "5",
            "--report",
            str(report),
        )
        command = (sys.executable, "-m", "hapi.cli.train", "--server", self._url, "--threads", "1")
        return self._bed.start(
            "client",
            [*command, "--no-progress", "--no-output", *job.flags, *files],
            env=environment(job.token),
            stdout=output,
            stderr=output,
        )


def _wait_for_room(folder: Path) -> None:
    """Return when a trainer would find room for its checkpoints: at its start it refuses to do without."""
    while shutil.disk_usage(folder).free < ROOM_BYTES:
        time.sleep(0.2)


class Replacer(Background):
    """Packs datasets again and again."""

    def __init__(self, bed: Bed, packings: Sequence[Sequence[str]], every: float) -> None:
        """``packings``: ``pack`` and its arguments, one after the other."""
        super().__init__(every)
        self._bed, self._packings = bed, itertools.cycle(packings)
        self.seen: Counter[str] = Counter()
        """Packings that ended well, and what the others said."""

    def step(self) -> None:
        """Pack the next dataset anew, and count how that ended."""
        process = self._bed.start(
            "client",
            [sys.executable, "-m", "hapi.cli.main", *next(self._packings), "--replace"],
            env=environment(""),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with contextlib.suppress(ValueError):
            _, errors = process.communicate()
            self.seen[f"failed: {last_line(errors or '')}" if process.returncode else "packed"] += 1
