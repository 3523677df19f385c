"""Whole trainings that share a sample cache: at the same time, killed, and one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.harness import (
    DIGITS_JOB,
    hapi,
    losses,
    of_epochs,
    packed_digits,
    report_of,
    server,
    start_train,
    train,
    wait_for,
)
from support.proxy import gated

COMMON = (
    *DIGITS_JOB, "--bs", "50", "--request-size", "16", "--augment", "crop-flip", "--split", "none", "--epochs",
    "2",
)  # fmt: skip
COUNT, HELD = 400, 12
"""Samples; requests of 16 of them after which two jobs at a time are held until both of them write."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


@pytest.fixture(scope="module")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run without a cache."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    with server(store) as running:
        train(*COMMON, "--server", running.url, "--report", str(path))
    return report_of(path)


def received(report: dict[str, Any]) -> list[int]:
    return of_epochs(report, "bytes_received")


@pytest.mark.slow
def test_two_at_a_time_one_killed_and_one_afterwards(
    store: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    cache, report = tmp_path / "cache", tmp_path / "report.json"
    with server(store, log=tmp_path / "log") as running:
        shared = (*COMMON, "--cache", "auto", "--cache-dir", str(cache))
        with gated(running.port, HELD) as first_gate, gated(running.port, HELD) as second_gate:
            jobs = [
                start_train(*shared, "--seed", str(seed), "--report", str(tmp_path / f"{seed}.json"),
                            "--server", gate.url)
                for seed, gate in enumerate((first_gate, second_gate))
            ]  # fmt: skip
            wait_for(lambda: len(list(cache.glob("*@*/*-*"))) == 2, 90, "both trainers write")
            jobs[1].kill()
            jobs[1].communicate()
            first_gate.open()
            output = jobs[0].communicate(timeout=240)[0]
        assert jobs[0].returncode == 0, output
        first = report_of(tmp_path / "0.json")
        assert losses(first) == losses(undisturbed) and "cached 100%" in output
        assert received(first)[0] <= received(undisturbed)[0] and received(first)[1] == 0
        # What the killed one left is removed as soon as somebody needs room; nobody does here.
        train(*shared, "--server", running.url, "--report", str(report))
        assert losses(report_of(report)) == losses(undisturbed)
        assert received(report_of(report)) == [0, 0]
        assert of_epochs(report_of(report), "cached_samples") == [COUNT, COUNT]
    assert "digits@" in hapi("cache", "ls", str(cache)).stdout
    assert "removed 1 version" in hapi("cache", "clear", str(cache)).stdout
    assert {path.name for path in cache.iterdir()} == {"hapi-cache", "lock"}


@pytest.mark.slow
def test_wrong_folder_and_wrong_size(store: Path, tmp_path: Path) -> None:
    done = train(*COMMON, "--store", str(store), "--cache", "on", "--cache-dir", str(store), code=2)
    assert done.stderr.count("\n") == 1 and f"--cache-dir {store}: has other files in it" in done.stderr
    done = train(*COMMON, "--store", str(store), "--cache-size", "1KB", code=2)
    assert "--cache-size: expected" in done.stderr
    done = train(*COMMON, "--store", str(store), "--cache", "off", "--cache-size", "1GB", code=2)
    assert "--cache-size: has no effect with --cache off" in done.stderr
