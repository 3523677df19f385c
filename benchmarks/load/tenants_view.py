"""Presentation of ``benchmarks tenants``: rows, the table beside the earlier text's ratios, and the figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.tenants import STORE, WHOLE
from hapi.figures.canvas import COLOURS, canvas, save
from hapi.units import format_bytes

PAPER_MEAN, PAPER_AT_TEN = 2.2, 4.9
"""Throughput by mean completion time over all-in-the-store: on average, and with ten tenants (earlier text, 5.5)."""


@dataclass(frozen=True, kw_only=True)
class TenantsRow:
    """One mode with some tenants."""

    mode: str
    tenants: int
    samples: int
    """Samples of each job."""
    seconds: tuple[float, ...]
    """Seconds of each finished job, from the moment at which all were requested."""
    opening: float | None
    """Mean seconds of these in which a whole job opened its model; None for the other modes."""
    errors: tuple[str, ...]
    budget: int
    load: float | None
    """Load of the machine when it began."""
    memory: tuple[tuple[float, int], ...]
    """(seconds, bytes of the budget in use) over time."""

    @property
    def makespan(self) -> float:
        """Seconds until the last job was over."""
        return max(self.seconds, default=0.0)

    @property
    def mean(self) -> float:
        """Mean completion time, in seconds."""
        return statistics.mean(self.seconds) if self.seconds else 0.0

    @property
    def most_memory(self) -> int:
        """Bytes."""
        return max((used for _, used in self.memory), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return the row of a table."""
        return {
            "mode": self.mode,
            "tenants": self.tenants,
            "makespan": self.makespan,
            "mean": self.mean,
            "opening": self.opening,
            "failed": len(self.errors),
            "budget": self.budget,
            "most_memory": self.most_memory,
            "load": self.load,
        }


def tenants_rows(records: Sequence[Mapping[str, Any]], samples: int) -> list[TenantsRow]:
    """Return the rows of a results file; the last of each mode and number of tenants."""
    rows = {}
    for r in records:
        if r["kind"] == "run":
            opening = r.get("opening")
            rows[r["mode"], r["tenants"]] = TenantsRow(
                mode=r["mode"],
                tenants=r["tenants"],
                samples=samples,
                seconds=tuple(r["seconds"]),
                opening=statistics.mean(opening) if opening else None,
                errors=tuple(r["errors"]),
                budget=r["budget"],
                load=r.get("load"),
                memory=tuple((at, used) for at, used in r["memory"]),
            )
    return list(rows.values())


def tenants_table(rows: Sequence[TenantsRow], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Modes side by side for each number of tenants, as lines for a person."""
    head = (
        f"{'tenants':>7}  {'mode':<9}{'makespan':>11}{'mean job':>11}{'samples/s':>11}"
        f"{'most memory':>14}{'of budget':>11}{'failed':>8}{'load':>7}"
    )
    lines = [head]
    for count in sorted({row.tenants for row in rows}):
        for row in (row for row in rows if row.tenants == count):
            rate = len(row.seconds) * row.samples / row.makespan if row.makespan else 0.0
            lines.append(
                f"{count:>7}  {row.mode:<9}{row.makespan:>9.2f} s{row.mean:>9.2f} s{rate:>11.1f}"
                f"{format_bytes(row.most_memory):>14}{row.most_memory / row.budget:>11.0%}{len(row.errors):>8}"
                f"{'' if row.load is None else format(row.load, '.1f'):>7}"
            )
    lines += [*_ratio_lines(rows), "", *_openings(rows), *_sharing_lines(records)]
    for row in rows:
        lines += [f"{row.mode}, {row.tenants} tenants: {error}" for error in dict.fromkeys(row.errors)]
    return lines


def ratios(rows: Sequence[TenantsRow], mode: str, against: str) -> dict[int, tuple[float, float]]:
    """Return how many times longer ``against`` takes, by number of tenants: (mean job, makespan), where no
    job failed.
    """
    by = {(row.mode, row.tenants): row for row in rows if row.seconds and not row.errors}
    return {
        row.tenants: (
            by[against, row.tenants].mean / row.mean,
            by[against, row.tenants].makespan / row.makespan,
        )
        for row in by.values()
        if row.mode == mode and (against, row.tenants) in by
    }


def _ratio_lines(rows: Sequence[TenantsRow]) -> list[str]:
    lines = []
    modes = list(dict.fromkeys(row.mode for row in rows))
    for against, what in ((WHOLE, "no batch adaptation"), (STORE, "all in the store")):
        for mode in modes:
            found = ratios(rows, mode, against) if mode not in (WHOLE, STORE) else {}
            if not found:
                continue
            each = ", ".join(f"{n}: {mean:.2f} ({all_:.2f})" for n, (mean, all_) in sorted(found.items()))
            average = statistics.mean(mean for mean, _ in found.values())
            lines.append(f"{mode} over {what}, mean job (makespan) by tenants: {each}; average {average:.2f}")
    if lines:
        lines.append(
            f"the earlier text (section 5.5, two T4s): {PAPER_MEAN} over all in the store on average, "
            f"{PAPER_AT_TEN} with ten tenants"
        )
    return ["", *lines] if lines else []


def _openings(rows: Sequence[TenantsRow]) -> list[str]:
    found = [row.opening for row in rows if row.opening is not None]
    if not found:
        return []
    line = (
        f"opening its model takes a whole job {min(found):.1f} to {max(found):.1f} s of the above on average; "
        "the server has its layers already"
    )
    return [line]


def _sharing_lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [r for r in records if r["kind"] == "sharing"]
    if not found:
        return []
    last = found[-1]
    first, both = last["resident"]
    line = (
        f"two jobs, one backbone ({last['model']}, {last['shared_layers']} layers alike): resident "
        f"{format_bytes(first)}, then {format_bytes(both)}; the second adds {format_bytes(both - first)}, "
        f"what differs is {format_bytes(last['differing_bytes'])} of {format_bytes(last['front_bytes'])}"
    )
    return [line]


def draw_tenants(rows: Sequence[TenantsRow], path: str) -> None:
    """Makespan (solid) and mean job (dashed) over the tenants, and memory over time with most of them."""
    order = ("server", "network", "client", "stall", "chosen")
    modes = list(dict.fromkeys(row.mode for row in rows))
    colours = {mode: COLOURS[order[i % len(order)]] for i, mode in enumerate(modes)}
    largest = max(row.tenants for row in rows)
    with canvas(8.0, 7.0) as figure:
        top, bottom = figure.subplots(2, 1)
        for mode in modes:
            of = sorted((row for row in rows if row.mode == mode), key=lambda row: row.tenants)
            counts = [row.tenants for row in of]
            top.plot(counts, [row.makespan for row in of], "o-", color=colours[mode], label=mode)
            top.plot(counts, [row.mean for row in of], "o--", color=colours[mode])
            for row in (row for row in of if row.tenants == largest and row.memory):
                at, used = zip(*row.memory, strict=True)
                bottom.plot(at, [n / 2**20 for n in used], color=colours[mode], label=mode)
        bottom.axhline(rows[0].budget / 2**20, color=COLOURS["muted"], linewidth=0.8)
        top.set_title("seconds until all jobs are over (solid), and of a job on average (dashed)")
        top.set_xlabel("tenants")
        bottom.set_title(f"memory of the storage device with {largest} tenants, MiB; line: the budget")
        bottom.set_xlabel("seconds")
        top.legend()
        save(figure, path)
