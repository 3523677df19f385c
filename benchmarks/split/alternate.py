"""Batches that alternate between two splits, beside the best one split, on the profiles that a sweep recorded. Pure.

Both are priced by the cost model, so nothing but the choice differs; servers of other speeds are those of the profile,
so many times as fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.split.replay import mean_profile
from benchmarks.split.study import measured_cells
from benchmarks.testbed.conditions import recorded_conditions
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import plan
from hapi.units import format_bandwidth

SPEEDS = (1.0, 2.0, 8.0)
"""Times that the server is as fast as the one that was profiled."""


@dataclass(frozen=True, kw_only=True)
class AlternateRow:
    """One cell of the sweep, with a server of one speed."""

    model: str
    bs: int
    bandwidth: float
    speed: float
    split: int
    """Best one split."""
    seconds: float
    """Seconds of its epoch."""
    wire_bytes: int
    """Bytes of its epoch."""
    pair: tuple[int, int, float] | None
    """(split of most batches, other split, its share); None where one split is as good."""
    pair_seconds: float
    pair_bytes: int

    @property
    def ratio(self) -> float:
        """Seconds of the plan over those of the best one split."""
        return self.pair_seconds / self.seconds


@dataclass(frozen=True, kw_only=True)
class AlternateResult:
    """All rows."""

    rows: tuple[AlternateRow, ...]
    conditions: Mapping[str, Any]

    def table(self) -> list[str]:
        """Lines of a table, and what they come to by the server's speed."""
        head = f"{'model':<13}{'bs':>5}{'bandwidth':>13}{'server':>8}{'split':>7}{'s':>9}{'pair':>15}{'s':>9}"
        lines = [head + f"{'ratio':>7}{'bytes':>7}"]
        for row in self.rows:
            pair = "-" if row.pair is None else f"{row.pair[0]}, {row.pair[2]:.0%} at {row.pair[1]}"
            lines.append(
                f"{row.model:<13}{row.bs:>5}{format_bandwidth(row.bandwidth):>13}{row.speed:>7g}x{row.split:>7}"
                f"{row.seconds:>9.2f}{pair:>15}{row.pair_seconds:>9.2f}{row.ratio:>7.2f}"
                f"{row.pair_bytes / row.wire_bytes:>7.2f}"
            )
        for speed in dict.fromkeys(row.speed for row in self.rows):
            mine = [row for row in self.rows if row.speed == speed]
            better = [row.ratio for row in mine if row.pair is not None]
            line = f"server {speed:g}x: two splits beat the best one in {len(better)} of {len(mine)} cells"
            if better:
                line += f"; there {statistics.median(better):.2f} of its seconds in the median"
                line += f", {min(better):.2f} at best"
            lines.append(line)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the rows, the table and the conditions of the sweep."""
        return {
            "benchmark": "alternate",
            "table": self.table(),
            "rows": [asdict(row) for row in self.rows],
            "conditions": self.conditions,
        }


def alternate(records: Sequence[Mapping[str, Any]], speeds: Sequence[float] = SPEEDS) -> AlternateResult:
    """Price each whole cell of a sweep's ``records`` both ways; :class:`UsageError` where there is none."""
    plans: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == "plan":
            plans.setdefault(record["cell"], []).append(record)
    cells = [one.cell for one in measured_cells(records)]
    rows = []
    for cell in sorted(cells, key=lambda c: (c.model, c.bs, c.bandwidth)):
        profile = mean_profile([Profile.from_json(record["profile"]) for record in plans[cell.key]])
        job = Job(bs=cell.bs, samples=plans[cell.key][-1]["samples"])
        for speed in speeds:
            rows.append(_row(cell, _faster(profile, speed), job, speed))
    return AlternateResult(rows=tuple(rows), conditions=dict(recorded_conditions(records)))


def _row(cell: Any, profile: Profile, job: Job, speed: float) -> AlternateRow:
    found = plan("auto", profile, job)
    best, at = found.chosen.estimate, found.alternation
    sent = [candidate.estimate.epoch_wire_bytes for candidate in found.candidates]
    both = (
        best.epoch_wire_bytes if at is None else (1 - at.share) * sent[at.split] + at.share * sent[at.other]
    )
    return AlternateRow(
        model=cell.model,
        bs=cell.bs,
        bandwidth=cell.bandwidth,
        speed=speed,
        split=best.split,
        seconds=best.epoch_seconds,
        wire_bytes=best.epoch_wire_bytes,
        pair=None if at is None else (at.split, at.other, at.share),
        pair_seconds=found.epoch_seconds,
        pair_bytes=round(both),
    )


def _faster(profile: Profile, speed: float) -> Profile:
    layers = tuple(replace(x, server_seconds=x.server_seconds / speed) for x in profile.layers)
    return replace(profile, layers=layers)
