"""``benchmarks keep``, the part about choices: replays the cells of a grid, and tells how often the choice is right."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.keep.epochs import Epoch
from benchmarks.keep.grid import HELD, MEASUREMENTS, SWEEP, TRIAL, of_kind
from benchmarks.keep.judging import judge
from benchmarks.keep.machines import Machines
from benchmarks.split.replay import mean_profile
from benchmarks.split.study import measured_cells
from benchmarks.testbed.cells import Results, read
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.units import format_duration

WITHIN, SHARE = 0.05, 0.95
"""Goal: the choice is within this part of the best, in at least this share of the cells."""
WORST = 8
"""Cells that are shown."""
_SWEEP_REQUEST = 16


def replay_grid(
    results: Results, count: int, trial: bool, known: Sequence[Mapping[str, Any]], tell: Callable[[str], None]
) -> None:
    """Replay the first ``count`` cells of the held grid, or of the one for trials, that ``results`` does not hold.

    The best choices of cells of which there is a record among ``known`` are those; others are searched.
    """
    found = {record["cell"]: record for record in of_kind(known, "choice")}
    cells = (TRIAL if trial else HELD).cells(count)
    done = {record["cell"] for record in of_kind(results.records, "choice")}
    todo = [cell for cell in cells if cell.key not in done]
    tell(f"{len(cells)} cells, {len(todo)} to replay")
    began = time.monotonic()
    for number, cell in enumerate(todo):
        results.add(judge(cell, found.get(cell.key)))
        if number % 20 == 19:
            left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
            tell(f"{number + 1} of {len(todo)}; about {format_duration(left)} left")


def check_replay(results: Results) -> None:
    """Replay epochs that the kept sweep measured, at every split, and record how far off the replay is."""
    if of_kind(results.records, "replay check"):
        return
    records = list(read(MEASUREMENTS / SWEEP))
    profiles: dict[str, list[Profile]] = {}
    for record in records:
        if record["kind"] == "plan":
            profiles.setdefault(record["cell"], []).append(Profile.from_json(record["profile"]))
    off: list[float] = []
    for one in measured_cells(records):
        profile = mean_profile(profiles[one.cell.key])
        samples = next(r["samples"] for r in records if r["kind"] == "plan" and r["cell"] == one.cell.key)
        job = Job(bs=one.cell.bs, samples=samples, epochs=1, request_size=_SWEEP_REQUEST)
        for split, seconds in sorted(one.times.items()):
            choice = Choice(mode="recompute", cut=0, crossing=Crossing(split=split))
            found = Epoch(Machines(profile, job, None, None), choice, 0).run()
            off.append(found / statistics.median(seconds) - 1)
    sizes = sorted(map(abs, off))
    results.add(
        {
            "kind": "replay check",
            "epochs": len(off),
            "median_off": statistics.median(sizes),
            "p95_off": sizes[int(0.95 * (len(sizes) - 1))],
            "mean_error": statistics.fmean(off),
        }
    )


def over(record: Mapping[str, Any], name: str) -> float:
    """Return how much longer than the best the job takes, as a share; ``name`` is ``planned`` or ``run``."""
    return float(record[name] / record["best"] - 1)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of the replayed cells."""
    cells = of_kind(records, "choice")
    found: dict[str, Any] = {"cells": len(cells)}
    if not cells:
        return found
    for name in ("planned", "run"):
        excess = sorted(over(record, name) for record in cells)
        found[name] = {
            "within": sum(value <= WITHIN for value in excess) / len(excess),
            "within_10": sum(value <= 2 * WITHIN for value in excess) / len(excess),
            "median": statistics.median(excess),
            "p95": excess[int(0.95 * (len(excess) - 1))],
            "worst": excess[-1],
        }
    forecast = sorted(abs(record["forecast"] / record["planned"] - 1) for record in cells)
    found["forecast_off"] = {
        "median": statistics.median(forecast),
        "p95": forecast[int(0.95 * (len(forecast) - 1))],
    }
    found["over_budget"] = sum(map(_over_budget, cells))
    found["best_modes"] = dict(Counter(_mode(record["best_choice"]) for record in cells))
    found["chosen_modes"] = dict(Counter(record["mode"] for record in cells))
    return found


def _mode(text: str) -> str:
    return next(
        mode for mode in ("recompute", "keep samples", "keep there", "keep here") if text.startswith(mode)
    )


def _over_budget(record: Mapping[str, Any]) -> bool:
    own, beside_store = record["budget"]
    forecast = beside_store if record["mode"] == "keep there" else own
    return record["forecast_bytes"] > forecast or any(
        record[name][side] > budget
        for name in ("planned_bytes", "run_bytes")
        for side, budget in enumerate((own, beside_store))
    )


def choice_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures as lines for a person; none without a cell."""
    cells = of_kind(records, "choice")
    if not cells:
        return []
    found = summary(records)
    lines = [f"{found['cells']} cells replayed: seconds of the job over those of the best choice"]
    lines.append(f"  {'':<26}{'within 5%':>11}{'within 10%':>12}{'median':>9}{'p95':>9}{'worst':>9}")
    for name, title in (("planned", "as planned at the start"), ("run", "as a run chooses anew")):
        row = found[name]
        lines.append(
            f"  {title:<26}{row['within']:>11.1%}{row['within_10']:>12.1%}{row['median']:>9.1%}{row['p95']:>9.1%}"
            f"{row['worst']:>9.1%}"
        )
    reached = "reached" if found["planned"]["within"] >= SHARE else "missed"
    ran = "reached" if found["run"]["within"] >= SHARE else "missed"
    lines.append(f"  goal {SHARE:.0%} within {WITHIN:.0%}: as planned {reached}, as a run chooses {ran}")
    off = found["forecast_off"]
    lines.append(f"  forecast of the whole job off by {off['median']:.1%} (median), {off['p95']:.1%} (p95)")
    lines.append(f"  over the byte budget: {found['over_budget']} cells")
    lines.append(f"  best modes: {found['best_modes']}; chosen: {found['chosen_modes']}")
    for check in of_kind(records, "replay check"):
        lines.append(
            f"  the replay beside {check['epochs']} measured epochs of the sweep: {check['median_off']:.1%} off "
            f"(median), {check['p95_off']:.1%} (p95)"
        )
    for name, title in (("planned", "planned"), ("run", "run")):
        worst = sorted(cells, key=lambda record: -over(record, name))[:WORST]
        lines.append(f"  worst, {title}:")
        lines += [_worst_line(record, name) for record in worst if over(record, name) > WITHIN]
    return lines


def _worst_line(record: Mapping[str, Any], name: str) -> str:
    chosen = record["chosen"] if name == "planned" else " > ".join(record["run_choices"])
    return (
        f"    {over(record, name):+.0%} {record['cell']}: {chosen} ({record[name]:.0f} s, forecast "
        f"{record['forecast']:.0f} s); best {record['best_choice']} ({record['best']:.0f} s)"
    )
