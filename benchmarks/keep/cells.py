"""``benchmarks keep``, the part that is measured: jobs in each mode that flags can force, beside the run's own choice.

The runs are those of ``benchmarks epochs``, on the test bed; later epochs are computed from those that were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.epochs.engine import measure
from benchmarks.epochs.rows import Row, rows_of
from benchmarks.epochs.settings import EpochsSettings, Prices
from benchmarks.keep.choices import WITHIN
from benchmarks.testbed.cells import Results
from benchmarks.testbed.testbed import TestBed

OURS = "hapi"
FORCED = ("recompute", "images", "kept images", "always")
SETTINGS = EpochsSettings(
    models=("resnet18", "resnet50"),
    bandwidths=(15e6, 100e6, 1e9),
    counts=(2, 20),
    ways=(*FORCED, OURS),
    measured=3,
    samples=384,
    bs=32,
)
"""Twelve cells: a model at a bandwidth for a number of epochs."""


def measure_cells(results: Results, tell: Callable[[str], None]) -> None:
    """Measure what ``results`` does not hold; UsageError where there is no test bed."""
    measure(TestBed(), SETTINGS, results, tell)


def cell_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell of which the choice and every forced mode were measured."""
    runs = [dict(record) for record in records if record["kind"] == "run"]
    rows = rows_of(runs, SETTINGS.counts, Prices()) if runs else []
    found = []
    for cell, count in dict.fromkeys((row.cell, row.epochs) for row in rows):
        mine: dict[str, Row] = {row.way: row for row in rows if (row.cell, row.epochs) == (cell, count)}
        if OURS not in mine or not all(way in mine for way in FORCED):
            continue
        seconds = {way: _training(row) for way, row in mine.items()}
        best = min(FORCED, key=lambda way: seconds[way])
        longest_first = sorted(runs, key=lambda run: -run["planned"])
        planned = {
            run["way"]: run for run in longest_first if run["cell"] == cell and run["planned"] >= count
        }
        found.append(
            {
                "cell": cell,
                "epochs": count,
                "seconds": seconds,
                "best": best,
                "over": seconds[OURS] / min(seconds.values()) - 1,
                "as_best": _did(planned[OURS], count) == _did(planned[best], count),
            }
        )
    return found


def _did(run: Mapping[str, Any], count: int) -> list[list[Any]]:
    """Splits, and what was kept and hit, of the epochs that ran, of the first ``count``."""
    facts = ("splits", "feature_hits", "features_kept", "cached_samples")
    return [[epoch.get(fact) for fact in facts] for epoch in run["epochs"][:count]]


def _training(row: Row) -> float:
    """Seconds of the epochs, without the start of the process."""
    return row.seconds - row.start_seconds


def cell_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the measured cells as lines for a person; none without one."""
    rows = cell_rows(records)
    if not rows:
        return []
    lines = ["measured jobs: seconds by the run's own choice, and in each mode that flags force"]
    for row in rows:
        forced = ", ".join(f"{way} {row['seconds'][way]:.1f}" for way in FORCED)
        lines.append(
            f"  {row['cell']:<22}{row['epochs']:>3} epochs: {row['seconds'][OURS]:>7.1f} s ({row['over']:+.1%}); "
            + forced
        )
    within = sum(row["over"] <= WITHIN for row in rows)
    same = sum(row["as_best"] for row in rows)
    verdict = f"  within {WITHIN:.0%} of the shortest: {within} of {len(rows)}; "
    return [*lines, f"{verdict}same splits, kept features and hits as the shortest forced mode: {same}"]
