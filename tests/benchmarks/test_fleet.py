"""``benchmarks fleet``: its cells, its figures and page, and its test bed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks.fleet import engine
from benchmarks.fleet.bed import FleetBed
from benchmarks.fleet.cells import cells, fleet_of, method
from benchmarks.fleet.engine import rate_between
from benchmarks.fleet.experiments import moved
from benchmarks.fleet.fair_link import PORTS, fair_link
from benchmarks.fleet.page import page, verdict
from benchmarks.fleet.whole import rates_of
from benchmarks.testbed import testbed
from benchmarks.testbed.cells import Results
from hapi.errors import UsageError


def test_cells_are_different_and_mostly_held_out() -> None:
    known = cells()
    assert len({cell.key for cell in known}) == len(known)
    fitted = [cell for cell in known if not cell.hold_out]
    assert {cell.servers for cell in fitted} == {1, 2, 3, 4} and len(fitted) <= len(known) / 4
    assert {(c.servers, c.trainers) for c in known} >= {(s, t) for s in (1, 4) for t in (1, 8)}
    for cell in known:
        assert len(fleet_of(cell).servers) == cell.servers


def test_runs_of_a_cell_are_apart_and_each_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [replace(cell, runs=runs) for cell, runs in zip(cells(), (1, 2, 2), strict=False)]
    measured: list[str] = []

    def run(*_: Any) -> dict[str, Any]:
        measured.append("run")
        return {"samples_per_second": float(len(measured))}

    for name in ("FleetBed", "BenchClient", "make_store", "_start_servers"):
        monkeypatch.setattr(engine, name, MagicMock())
    monkeypatch.setattr(engine, "_measured", run)
    results = Results(tmp_path / "fleet.jsonl", {"grid": method()})
    results.add({"kind": "profile"})
    engine.measure_cells(results, known, lambda _: None)
    engine.measure_cells(Results(results.path, {"grid": method()}), known, lambda _: None)
    first, second, third = (cell.key for cell in known)
    assert rates_of(results.records) == {first: [1.0], second: [2.0, 4.0], third: [3.0, 5.0]}
    assert len(measured) == 5


def test_records_of_another_way_of_measuring_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.jsonl"
    file.write_text(json.dumps({"kind": "conditions", "grid": {**method(), "queues": "one"}}) + "\n")
    with pytest.raises(UsageError, match="was measured with queues one"):
        Results(file, {"grid": method()})


def test_a_batch_counts_as_far_as_it_lies_in_the_time() -> None:
    ends = [(2.0, 16), (4.0, 16), (5.0, 8), (15.0, 16)]
    assert rate_between(0.0, ends, 0.0, 4.0) == pytest.approx(8.0)
    assert rate_between(1.0, ends, 0.0, 2.0) == pytest.approx(8.0)
    assert rate_between(0.0, ends, 1.0, 4.5) == pytest.approx((8 + 16 + 4) / 3.5)
    assert rate_between(0.0, ends, 6.0, 11.0) == pytest.approx(1.6)
    assert rate_between(0.0, ends, 20.0, 25.0) == 0.0
    assert rate_between(0.0, [], 0.0, 1.0) == 0.0


def test_each_connection_has_a_class_of_its_own() -> None:
    lines = fair_link("hapi", 12e6, 4).splitlines()
    classes = [line.split("classid ")[1].split()[0] for line in lines if "ceil" in line]
    assert len(set(classes)) == len(classes) == 4 * len(PORTS)
    assert all(
        "ceil 12000000bit" in line for line in lines if line.startswith("class") and "parent 1:1" in line
    )
    assert len(PORTS) & (len(PORTS) - 1) == 0 and PORTS.start % len(PORTS) == 0
    assert PORTS.start > 1024 and PORTS.stop <= 1 << 16


def test_moved_is_the_largest_share_that_changed_at_once() -> None:
    assert moved([(0, {1: 4}), (1, {1: 3, 2: 1}), (2, {2: 4})]) == pytest.approx(0.75)
    assert moved([(0, {1: 4})]) == 0.0


def a_document() -> dict[str, Any]:
    """What the benchmark writes, shortened."""
    cell = {
        "servers": 2, "trainers": 4, "link": 24e6, "pause": 0.05, "shared": None, "slow": 0.25, "hold_out": True,
        "measured": 100.0, "rates": [90.0, 110.0], "simulated": 104.0, "error": 0.04,
    }  # fmt: skip
    herd = {"samples_per_second": 10.0, "changes_per_100_batches": 1.0, "moved": 0.5}
    quantiles = {"p50": 0.1, "p99": 0.2}
    row = {
        "name": "as usual", "share": 0.5, "trainers": 10, "servers": 2, "samples_per_second": 50.0, "slowest": 4.0,
        "stalled": 0.1, "latency": quantiles, "wait": quantiles, "processors": 0.5, "retries": 3, "extra": 1,
        "split": 4, "changes_per_100_batches": 1.5, "moved": 0.25, "requests": 20, "wall_seconds": 2.0,
    }  # fmt: skip
    return {
        "conditions": {"date": "2026-11-25T20:00:00", "processor": "P", "cores": 2, "load_at_start": 1},
        "test_bed": "a bed", "job": "a job", "machines": "machines", "herd_fleet": "a herd",
        "overhead": 0.001, "efficiency": 0.95, "jitter": 0.01, "held_out": {"count": 1, "median": 0.04, "worst": 0.2},
        "cells": [cell],
        "knees": [
            {"model": "m", "link": 1e9, "rates": {"1": 5.0}, "splits": {"1": 3}, "knee": 1, "per_trainer": 0.06}
        ],
        "herd": [{"name": "split 1", "fixed": True, **herd}, {"name": "at once", "fixed": False, **herd}],
        "sizing": [row], "faults": [row], "racks": [row], "crowd": [row], "large": [row],
    }  # fmt: skip


def test_the_page_has_a_row_for_everything() -> None:
    text = page(a_document(), "fleet.json")
    for said in (
        "| 2 | 4 | 24, one 6 | 50 | 100.0 (90.0, 110.0) | 104.0 | +4.0% |",
        "| at once | 100.0% |",
        "| 10 | **2** | 50 | 100% |",
        "| as usual | 50 | 100.0% | 4.0 |",
        "| as usual | 50 | 100.0% | 1.50 | 25% |",
    ):
        assert said in text
    said = "median 4.0% (goal 5%: met), worst 20.0% (goal 10%: missed); runs of the bed itself differ by up to 22.2%"
    assert said in verdict(a_document())


@pytest.mark.slow
@pytest.mark.skipif(testbed.why_not() is not None, reason=f"no test bed here: {testbed.why_not()}")
def test_the_bed_of_servers_is_made_and_removed() -> None:
    with FleetBed(2) as bed:
        bed.set_link(0, 24e6)
        bed.set_bandwidth(48e6)
        assert bed.sent_bytes()[-1] >= 0
        bed.set_bandwidth(None)
        made = [name for name in testbed.beds() if f"-{os.getpid()}-" in name]
        assert len(made) == 4
        bed.number = 1
        reply = bed.start("client", ["ip", "route", "get", bed.address])
        assert reply.wait(240) == 0
    assert [name for name in testbed.beds() if f"-{os.getpid()}-" in name] == []
