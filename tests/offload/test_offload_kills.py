"""Offloaded trainings that are killed at random moments go on from their last whole step, to the same weights."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
LOOPS = ("plain", "clipped", "accumulated", "half", "scheduled", "changed", "half-changed")
MANY_STEPS = 1_000_000
LONGEST_WAIT = 0.03
"""Seconds from a step's end to a kill: more than a step takes."""


class Nursery:
    """Starts trainings, follows them and kills them."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.offload_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.reached = 0
        """The last step that a training told of."""

    def begin(self, folder: Path, steps: int, loop: str) -> int:
        """Begin a training; return its process's number."""
        self._in.write(f"{folder} {steps} {loop}\n")
        self._in.flush()
        word, number = "", ""
        while word != "child":  # a child may be faster than the line on it
            word, _, number = self._line().partition(" ")
        return int(number)

    def _line(self) -> str:
        line = self._out.readline()
        assert line, "the trainings' process ended"
        self.reached = int(line) if line.strip().isdigit() else self.reached
        return line.strip()

    def until_end(self, lines: int | None = None) -> str:
        """Read lines, or all up to the last; return the last."""
        line = ""
        while not line.startswith("ended") and lines != 0:
            line = self._line()
            lines = None if lines is None else lines - 1
        return line

    def whole(self, folder: Path, steps: int, loop: str) -> None:
        """Train without a kill."""
        self.begin(folder, steps, loop)
        assert self.until_end() == "ended 0"

    def killed(self, folder: Path, steps: int, loop: str, lines: int, wait: float) -> None:
        """Kill a training some lines after its beginning, and a moment later."""
        child = self.begin(folder, steps, loop)
        self.until_end(lines)
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(child, signal.SIGKILL)
        assert self.until_end() in ("ended 0", f"ended {-signal.SIGKILL}")

    def close(self) -> None:
        self._in.close()
        self._process.wait(240)
        self._out.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def check_kills(nursery: Nursery, folder: Path, loop: str, kills: int) -> None:
    whole, job = folder / "whole", folder / "job"
    whole.mkdir()
    job.mkdir()
    chance, nursery.reached = random.Random(loop), 0
    for _ in range(kills):
        lines = chance.choice([0, 1, 1, 2, 2, 3, 4])  # 0: while it takes over what the one before left
        nursery.killed(job, MANY_STEPS, loop, lines, chance.uniform(0, LONGEST_WAIT))
    assert not (job / "model.pt").exists()
    steps = nursery.reached + 5
    assert kills // 2 < steps
    nursery.whole(job, steps, loop)
    nursery.whole(whole, steps, loop)
    expected, found = (torch.load(path / "model.pt") for path in (whole, job))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not (job / "a" / "hapi-offload").exists() and not (job / "b" / "hapi-offload").exists()


@pytest.mark.slow
@pytest.mark.long_cases("clipped", "half", "accumulated")
@pytest.mark.parametrize("loop", LOOPS)
def test_killed_at_random_moments_the_weights_are_the_same(
    loop: str, tmp_path: Path, nursery: Nursery
) -> None:
    check_kills(nursery, tmp_path, loop, 12)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loop", LOOPS)
def test_killed_at_two_hundred_random_moments_the_weights_are_the_same(
    loop: str, tmp_path: Path, nursery: Nursery
) -> None:
    check_kills(nursery, tmp_path, loop, 200)


@pytest.mark.slow
def test_killed_while_it_removes_its_files_it_can_begin_anew(tmp_path: Path, nursery: Nursery) -> None:
    steps = 4
    expected = None
    chance = random.Random(3)
    for _ in range(12):
        nursery.killed(tmp_path, steps, "plain", steps + 2, chance.uniform(0, 0.01))  # after "saved"
        (tmp_path / "model.pt").unlink()
        nursery.whole(tmp_path, steps, "plain")
        found = torch.load(tmp_path / "model.pt")
        expected = expected or found
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
        assert not (tmp_path / "a" / "hapi-offload").exists()
