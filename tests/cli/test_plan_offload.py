"""``hapi plan`` with the optimiser's states elsewhere: chosen as a run chooses, priced, and what would avoid it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.profiler_tools import heavy

from hapi.cli.main import main

JOB = ("--bs", "8", "--samples", "80", "--epochs", "3", "--cache", "0")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A profile whose trained part takes 3.3 GB with its states."""
    path = str(tmp_path / "profile.json")
    heavy().save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], saved: str, *flags: str) -> tuple[int, str, str]:
    code = main(("plan", "--profile", saved, *JOB, *flags))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], saved: str, *flags: str) -> dict[str, Any]:
    code, out, err = run(capsys, saved, "--json", *flags)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_states_of_what_does_not_fit_go_to_the_disk_and_are_priced(
    capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    flags = ("--memory", "2.5GB", "--disk-read", "1GB/s", "--disk-write", "500MB/s")
    code, out, _ = run(capsys, saved, *flags)
    assert code == 0 and "offload: to the disk, no split fits 2.33 GiB" in out
    assert "1.62 GiB read and 2.44 GiB written a step: 6.98 s at the disk's rate, which adds 4.98 s" in out
    assert "free from --bs 28 on, with --freeze 4 it is free" in out and "--freeze 3 would fit without" in out
    found = document(capsys, saved, *flags)
    offload, price = found["offload"], found["offload"]["price"]
    assert offload["needed"] and offload["where"] == "disk" and offload["fitting_freeze"] == 3
    assert price["transfer_seconds"] == pytest.approx(
        price["bytes_read"] / 1e9 + price["bytes_written"] / 5e8
    )
    assert (price["free_batch"], price["free_freeze"]) == (28, 4)
    assert price["added_seconds"] == pytest.approx(price["transfer_seconds"] - price["step_seconds"])
    slow, fast = found["candidates"], document(capsys, saved, "--offload", "off")["candidates"]
    for one, other in zip(slow, fast, strict=True):
        batch = one["estimate"]["stages"]["client"] - other["estimate"]["stages"]["client"]
        assert batch == pytest.approx(price["added_seconds"])
        memory = other["estimate"]["memory"]["peak"] - one["estimate"]["memory"]["peak"]
        assert memory == pytest.approx(offload["freed_bytes"], abs=8)


def test_splits_that_need_it_are_shown_with_their_price(
    capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    """Where one split fits, the states stay; others are candidates with offloading."""
    peaks = [c["estimate"]["memory"]["peak"] for c in document(capsys, saved)["candidates"]]
    assert peaks[2] < peaks[0]
    flags = ("--memory", f"{peaks[2] + 1000}B")
    code, out, _ = run(capsys, saved, *flags)
    assert code == 0 and "offload: not needed; 2 more splits fit" in out
    rows = [line for line in out.splitlines() if "does not fit the memory; with offload" in line]
    assert [row.split()[0] for row in rows] == ["0", "1"] and all("epoch" in row for row in rows)
    found = document(capsys, saved, *flags)
    assert [c["split"] for c in found["offload"]["candidates"]] == [0, 1]
    assert all(c["memory"] <= peaks[2] for c in found["offload"]["candidates"])
    assert document(capsys, saved, *flags, "--offload", "off")["offload"]["candidates"] == []


def test_asked_for_and_forbidden(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    assert "offload" not in run(capsys, saved)[1], "no question without a bound"
    code, _, err = run(capsys, saved, "--memory", "2.5GB", "--offload", "off")
    assert code == 1 and "no split fits the client's memory" in err
    code, out, _ = run(capsys, saved, "--offload", "disk", "--disk-read", "1GB/s")
    assert code == 0 and "offload: to the disk, asked for; it frees" in out
    code, out, _ = run(capsys, saved, "--offload", "host")
    assert code == 0 and "offload: to the host, asked for; it frees no memory that a CPU trains in" in out
    momentum = document(capsys, saved, "--offload", "disk", "--optimizer", "sgd")["offload"]
    adam = document(capsys, saved, "--offload", "disk", "--optimizer", "adamw")["offload"]
    assert momentum["price"]["bytes_read"] * 2 == adam["price"]["bytes_read"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--offload", "ssd"], "--offload: invalid choice: 'ssd'"),
        (["--optimizer", "rmsprop"], "--optimizer: invalid choice"),
        (["--disk-read", "0B/s"], "--disk-read: expected 1B/s to 10TB/s"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], saved: str, flags: list[str], message: str
) -> None:
    code, out, err = run(capsys, saved, *flags)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_a_run_that_offloaded_is_planned_from_what_it_needs_in_memory(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    """Its profile counts with the states elsewhere; a plan from its report starts before that."""
    report = {
        "settings": {"optimizer": "adamw", "momentum": 0.9},
        "epochs": [],
        "plan": {"profile": replace(heavy(), offloaded_bytes=2_000_000_000).to_json()},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    again = document(capsys, str(path), "--memory", "2.5GB")
    first = document(capsys, saved, "--memory", "2.5GB")
    assert again["offload"] == first["offload"] and again["candidates"] == first["candidates"]
    assert first["offload"]["freed_bytes"] > 2 * sum(x.parameter_bytes for x in heavy().layers)
