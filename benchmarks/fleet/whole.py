"""``benchmarks fleet``: the test bed's cells, the simulator fitted to some of them, and its tale of larger fleets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.fleet.cells import BS, FREEZE, MODEL, FleetCell, cells, fleet_of
from benchmarks.fleet.engine import Tell
from benchmarks.fleet.experiments import (
    HERD_LINK,
    HERD_SECONDS,
    HERD_SERVERS,
    HERD_TRAINERS,
    NARROW,
    NARROW_FOR,
    NARROW_FROM,
    Rows,
    herd,
    knees,
)
from benchmarks.fleet.sizes import crowd, faults, large, racks, sizing
from benchmarks.testbed.cells import Results
from hapi.cluster.simulation.calibrate import Calibration, ObservedRun, calibrate, samples_per_second
from hapi.errors import UsageError
from hapi.profiler.profile import Job, Profile
from hapi.units import format_duration

SIMULATED: Mapping[str, Callable[[], Rows]] = {
    "herd": herd, "knees": knees, "sizing": sizing, "faults": faults, "racks": racks, "crowd": crowd, "large": large,
}  # fmt: skip
PARTS = ("bed", *SIMULATED)


def simulate_parts(results: Results, parts: Sequence[str], tell: Tell) -> None:
    """Simulate the rows of the parts that are wanted, as far as ``results`` does not have them."""
    have = {(record["kind"], record.get("key")) for record in results.records}
    todo = [
        (name, key, row)
        for name, part in SIMULATED.items()
        if name in parts
        for key, row in part()
        if (name, key) not in have
    ]
    for number, (name, key, row) in enumerate(todo):
        began = time.monotonic()
        results.add({"kind": name, "key": key, "row": row()})
        tell(f"{number + 1} of {len(todo)}: {name} {key} in {format_duration(time.monotonic() - began)}")


def rates_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the samples per second of each cell's runs, by its key."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["kind"] == "cell":
            found.setdefault(record["cell"], []).append(record["samples_per_second"])
    return found


def calibrated(records: Sequence[Mapping[str, Any]], tell: Tell) -> tuple[Calibration, list[FleetCell]]:
    """Fit the simulator to the measured cells that are for it, and replay all of them.

    Args:
        records: of the test bed; the rate of a cell is the mean of its runs.
        tell: told what happens.

    Raises:
        UsageError: nothing was measured yet.
    """
    measured = {key: statistics.fmean(rates) for key, rates in rates_of(records).items()}
    recorded = next((record for record in records if record["kind"] == "profile"), None)
    chosen = [cell for cell in cells() if measured.get(cell.key)]
    if recorded is None or not chosen:
        raise UsageError("no cell was measured yet; run it with --part bed (needs root)")
    profile, job = Profile.from_json(recorded["profile"]), Job(**recorded["job"])
    runs = [
        ObservedRun(
            name=cell.key,
            fleet=fleet_of(cell),
            profiles={"trainers": (profile, job)},
            rate=measured[cell.key],
            hold_out=cell.hold_out,
        )
        for cell in chosen
    ]
    return calibrate(runs, samples_per_second, tell), chosen


def document_of(
    records: Sequence[Mapping[str, Any]], conditions: Mapping[str, Any], tell: Tell
) -> dict[str, Any]:
    """Return everything that was found, for the JSON and the page."""
    rows = {name: [r["row"] for r in records if r["kind"] == name] for name in SIMULATED}
    bed = _bed_part(records, tell) if any(record["kind"] == "cell" for record in records) else {}
    return {
        "benchmark": "fleet",
        "machines": "a core each, as in the kept sweep",
        "herd_fleet": f"{HERD_TRAINERS} trainers of resnet18, {HERD_SERVERS} servers, "
        f"{HERD_LINK / 1e6:g} Mbit/s shared by all, "
        f"{NARROW:.0%} of it from {NARROW_FROM:g} to {NARROW_FROM + NARROW_FOR:g} of {HERD_SECONDS:g} s; each trainer "
        "begins with the plan of one that is alone",
        "cells": [],
        **bed,
        **rows,
        "conditions": conditions,
        "test_bed": conditions.get("test_bed", ""),
    }


def _bed_part(records: Sequence[Mapping[str, Any]], tell: Tell) -> dict[str, Any]:
    """The cells that were measured beside their replays."""
    found, chosen = calibrated(records, tell)
    held = [error for error in found.errors if error.hold_out]
    sizes = [abs(error.error) for error in held] or [0.0]
    rates = rates_of(records)
    return {
        "job": f"{MODEL} at 64 px cut at layer {FREEZE}, 64 KiB a sample, batches and requests of {BS}",
        "overhead": found.overhead,
        "efficiency": found.efficiency,
        "jitter": found.jitter,
        "held_out": {"count": len(held), "median": statistics.median(sizes), "worst": max(sizes)},
        "cells": [
            {
                **vars(cell), "measured": error.observed, "rates": rates[cell.key], "simulated": error.simulated,
                "error": error.error,
            }
            for cell, error in zip(chosen, found.errors, strict=True)
        ],
    }  # fmt: skip
