"""A short while of fuzzing for each target; ``scripts/fuzz TARGET --seconds N`` goes on for longer."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_run import FOUND, mutation
from fuzz_targets import TARGETS, attempt
from support.forked import environment

RUNNER = Path(__file__).with_name("fuzz_run.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("frames", 4),
        *(pytest.param(name, 30, marks=pytest.mark.long) for name in TARGETS),
    ],
)
def test_a_while_of_fuzzing(name: str, seconds: int, tmp_path: Path) -> None:
    """Guided by coverage where atheris is installed."""
    done = fuzz(name, tmp_path, "--seconds", str(seconds))
    assert done.returncode == 0, f"{kept(tmp_path)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    guided = importlib.util.find_spec("atheris") is not None
    assert ("without atheris" in done.stdout) != guided


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [pytest.param(("--mutate",), marks=pytest.mark.long), ()], ids=["mutations", "as installed"]
)
def test_what_breaks_is_found_and_kept(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """A target that cannot bear a byte which no seed has."""
    done = fuzz("broken_on_purpose", tmp_path, "--seconds", "200", *arguments)
    assert done.returncode == FOUND, done
    assert "a byte that is not borne" in done.stdout + done.stderr
    assert kept(tmp_path).strip("[]'")


def fuzz(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), name, "--findings", str(folder / "findings"), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=250,
        env=environment(),
        cwd=folder,
        check=False,
    )


def kept(folder: Path) -> str:
    """The inputs that were found, for a regression case."""
    return str([path.read_bytes() for path in (folder / "findings").glob("*")])


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_good_and_their_neighbours_are_not_worse_than_refused(name: str) -> None:
    seeds, dice = TARGETS[name].seeds(), random.Random(name)
    assert any(attempt(name, seed) is None for seed in seeds)
    for _ in range(40):
        attempt(name, mutation(seeds, dice))
