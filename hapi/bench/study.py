"""The papers' tables and figures as views of one sweep's results; see :mod:`hapi.bench.sweep`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hapi.bench.cells import Cell, cells_of
from hapi.errors import UsageError
from hapi.units import format_bandwidth, format_bytes

ORDER = ("auto", "hapi", "nsg", "bandwidth", "min", "freeze", "none")
"""Strategies, as the tables list them."""


@dataclass
class Measured:
    """One cell's results."""

    cell: Cell
    choices: dict[str, int]
    estimates: dict[str, list[float]]
    """Seconds of the epoch by split: ``auto`` (streamed form), ``paper``, ``sum`` (Neurosurgeon's)."""
    wire: list[int]
    """Estimated bytes of an epoch by split."""
    times: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of whole epochs by split."""
    bytes_received: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, float] = field(default_factory=dict)
    """Of splits that were broken off: their epoch takes longer than this."""
    tensors: dict[str, float] = field(default_factory=dict)
    """NoSplit with samples stored as ``uint8`` or ``float32`` tensors; seconds."""

    def seconds(self, split: int) -> float | None:
        """The median of the whole epochs; None for a split that was broken off."""
        return statistics.median(self.times[split]) if split in self.times else None

    @property
    def best(self) -> float:
        """The shortest epoch's seconds: the truth that strategies are compared with."""
        return min(statistics.median(t) for t in self.times.values())

    def slower(self, split: int) -> float | None:
        """How much longer than the best, as a share; None when it is beyond all bounds."""
        seconds = self.seconds(split)
        return None if seconds is None else seconds / self.best - 1


def measured_cells(records: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The cells that were measured whole, in the order of their ends; :class:`UsageError` without any."""
    found = []
    cells = cells_of(dict(r) for r in records)
    for key, cell in cells.items():
        of = [r for r in records if r.get("cell") == key]
        plans = [r for r in of if r["kind"] == "plan"]
        if not plans:
            continue
        plan = plans[-1]
        one = Measured(cell, plan["choices"], {k: plan[k] for k in ("auto", "paper", "sum")}, plan["wire"])
        for r in of[of.index(plan) :]:
            if r["kind"] == "run" and r.get("over"):
                one.bounds[r["split"]] = r["seconds"]
            elif r["kind"] == "run" and r.get("ok"):
                one.bounds.pop(r["split"], None)
                one.times.setdefault(r["split"], []).append(r["seconds"])
                one.bytes_received[r["split"]] = r["bytes"]
            elif r["kind"] == "none" and r.get("ok") and not r["over"]:
                one.tensors[r["form"]] = r["seconds"]
        if one.times:
            found.append(one)
    if not found:
        raise UsageError("no cell has been measured whole yet; run 'hapi bench sweep' first")
    return found


def unfit_cells(records: Sequence[Mapping[str, Any]]) -> int:
    """Cells in which no split fitted the client's memory."""
    return len({r["cell"] for r in records if r["kind"] == "unfit"})


@dataclass(frozen=True)
class Optimality:
    """How often a strategy's split was how good (later HAPI text, Table 3). Counts of cells."""

    optimal: int
    within_5: int
    within_10: int
    within_15: int
    beyond: int

    @property
    def cells(self) -> int:
        """All of them."""
        return self.optimal + self.within_5 + self.within_10 + self.within_15 + self.beyond

    @property
    def good(self) -> float:
        """Share of optimal and within 5%."""
        return (self.optimal + self.within_5) / max(1, self.cells)


NOISE = 0.01
"""Two splits whose medians differ by less are equally good: the best of them is the luck of the run."""


def optimality(cells: Sequence[Measured], strategy: str) -> Optimality:
    """Table 3's row of ``strategy``."""
    counts = [0, 0, 0, 0, 0]
    for one in cells:
        slower = one.slower(one.choices[strategy])
        limits = (NOISE, 0.05, 0.10, 0.15)
        place = 4 if slower is None else next((i for i, limit in enumerate(limits) if slower <= limit), 4)
        counts[place] += 1
    return Optimality(*counts)


def optimality_table(cells: Sequence[Measured]) -> list[str]:
    """Table 3 for every strategy."""
    lines = [
        f"{'':<10}{'optimal':>9}{'<= 5%':>8}{'<= 10%':>8}{'<= 15%':>8}{'beyond':>8}{'cells':>7}{'within 5%':>11}"
    ]
    for strategy in ORDER:
        o = optimality(cells, strategy)
        lines.append(
            f"{strategy:<10}{o.optimal:>9}{o.within_5:>8}{o.within_10:>8}{o.within_15:>8}{o.beyond:>8}{o.cells:>7}{o.good:>11.1%}"
        )
    lines.append(
        "the paper's HAPI, its own setting (Table 3): 86.8% of 49 cases optimal or within 5%; goal for auto: 95%"
    )
    return lines


def errors(cells: Sequence[Measured], form: str, *, chosen_by: str | None = None) -> list[float]:
    """|estimated - measured| / measured of every whole epoch, or only at the splits that a strategy chose."""
    found = []
    for one in cells:
        for split in one.times:
            if chosen_by is None or split == one.choices[chosen_by]:
                seconds = one.seconds(split)
                if seconds:
                    found.append(abs(one.estimates[form][split] - seconds) / seconds)
    return found


def estimates_table(cells: Sequence[Measured]) -> list[str]:
    """Estimated against measured epoch seconds (Figure 11)."""
    lines = [f"{'':<36}{'median':>8}{'p95':>8}{'worst':>8}{'epochs':>8}"]
    rows = (
        ("auto (streamed), all splits", "auto", None),
        ("auto (streamed), at its choice", "auto", "auto"),
        ("hapi (paper's form), all splits", "paper", None),
        ("hapi (paper's form), at its choice", "paper", "hapi"),
        ("nsg (sum), all splits", "sum", None),
        ("nsg (sum), at its choice", "sum", "nsg"),
    )
    for name, form, chosen_by in rows:
        found = sorted(errors(cells, form, chosen_by=chosen_by))
        if found:
            p95 = found[min(len(found) - 1, round(0.95 * (len(found) - 1)))]
            median = statistics.median(found)
            lines.append(f"{name:<36}{median:>8.1%}{p95:>8.1%}{found[-1]:>8.1%}{len(found):>8}")
    lines.append("goal for auto: median 5%, p95 15%")
    return lines


def competitors_table(cells: Sequence[Measured]) -> list[str]:
    """Epoch seconds of every strategy over auto's (Figures 7 to 10); ``>`` where it was broken off."""
    names = [s for s in ORDER if s != "auto"]
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}{'auto s':>9}" + "".join(f"{n:>11}" for n in names)]
    lines[0] += f"{'none uint8':>12}{'none fp32':>11}"
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        auto = one.seconds(one.choices["auto"])
        if auto is None:
            auto = one.bounds[one.choices["auto"]]
        row = f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}{auto:>9.2f}"
        for name in names:
            split = one.choices[name]
            seconds = one.seconds(split)
            if seconds is None:
                row += f"{'>' + format(one.bounds.get(split, 0) / auto, '.2f'):>11}"
                ratios[name].append(one.bounds.get(split, 0) / auto)
            else:
                row += f"{seconds / auto:>11.2f}"
                ratios[name].append(seconds / auto)
        for form, width in (("uint8", 12), ("float32", 11)):
            seconds = one.tensors.get(form)
            row += f"{'>3' if seconds is None else format(seconds / auto, '.2f'):>{width}}"
        lines.append(row)
    lines.append(f"{'median':<40}" + "".join(f"{statistics.median(ratios[n]):>11.2f}" for n in names))
    lines.append(f"{'largest (at least)':<40}" + "".join(f"{max(ratios[n]):>11.2f}" for n in names))
    lines.append("times auto's epoch; the paper's HAPI is up to 2.5 times as fast as NoSplit (Figure 7)")
    return lines


def traffic_table(cells: Sequence[Measured]) -> list[str]:
    """Bytes of an epoch over the wire by strategy (earlier HAPI text, Figures 9 and 10), estimated where not run."""
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}" + "".join(f"{n:>12}" for n in ORDER)]
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        row = f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}"
        for name in ORDER:
            split = one.choices[name]
            row += f"{format_bytes(one.bytes_received.get(split, one.wire[split])):>12}"
        lines.append(row)
    return lines


def splits_table(cells: Sequence[Measured]) -> list[str]:
    """Epoch seconds at every split (Figure 3); ``>`` where it was broken off, ``*`` the best, ``a`` auto's choice."""
    lines = []
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        lines.append(f"{one.cell.model}, batch {one.cell.bs}, {format_bandwidth(one.cell.bandwidth)}:")
        row = "  "
        for split in sorted(one.times.keys() | one.bounds.keys()):
            seconds = one.seconds(split)
            text = f">{one.bounds[split]:.2f}" if seconds is None else f"{seconds:.2f}"
            marks = ("*" if seconds == one.best else "") + ("a" if split == one.choices["auto"] else "")
            row += f"{split}: {text}{marks}  "
        lines.append(row.rstrip())
    return lines


def bandwidth_table(cells: Sequence[Measured]) -> list[str]:
    """auto's split and epoch by bandwidth (Figure 13)."""
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}{'split':>7}{'seconds':>9}{'best':>6}{'seconds':>9}"]
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        split = one.choices["auto"]
        seconds = one.seconds(split)
        best = min(one.times, key=lambda s: one.seconds(s) or 0.0)
        shown = f">{one.bounds[split]:.2f}" if seconds is None else f"{seconds:.2f}"
        lines.append(
            f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}"
            f"{split:>7}{shown:>9}{best:>6}{one.best:>9.2f}"
        )
    return lines


VIEWS = {
    "optimality": optimality_table,
    "estimates": estimates_table,
    "competitors": competitors_table,
    "splits": splits_table,
    "bandwidth": bandwidth_table,
    "traffic": traffic_table,
}
"""The lines that ``hapi bench NAME`` prints of a sweep."""
