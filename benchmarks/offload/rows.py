"""Tables of the benchmark ``offload``, and what they say about its goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.offload.settings import (
    ACTIVE,
    ASIDE,
    BALANCED,
    COMPUTE,
    IO,
    MEMORY,
    NAIVE,
    OFFLOADED,
    SERIAL,
    WAYS,
)

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class OffloadRow:
    """One way in one group: medians over its turns."""

    group: str
    way: str
    parameters: int
    rows: int
    drives: int
    rounds: int
    seconds: float
    """Time of a step."""
    processor: float
    """Processor seconds of a step: what else a machine does changes them less."""
    system: float
    """Those of them in the kernel."""
    faults: float
    """Pages that a step takes from the kernel, which clears them; a count, which no other work changes."""
    samples_per_second: float
    over_memory: float | None
    """Seconds over those of AdamW in memory, by pairs of turns; None where it was not measured beside it."""
    peak_bytes: float
    anonymous_bytes: float
    device_bytes: float
    """Most bytes of tensors on a GPU; 0 on a CPU."""
    on_disk: float
    moved: float
    """Bytes that a step moves from and to the disk."""
    rate: float | None
    """Bytes a second of the disk under the same mix, in the same process."""
    over_bound: float | None
    """Seconds over max(compute, moved / rate), by pairs of turns; compute is the step of AdamW in memory."""
    redone: float
    """Share of the steps that were computed again."""
    swapped: float
    """Bytes of activations that the plan moves out of the memory in a step."""
    recomputed: int
    """Layers that the plan computes a second time."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that is to be reached."""

    what: str
    value: float
    goal: float
    at_least: bool
    pairs: int
    low: float
    high: float

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {**asdict(self), "reached": self.reached}


def turns_of(records: Records, group: str, *ways: str) -> list[Mapping[str, Any]]:
    """Return the answers of the group's turns in which all ``ways`` took part."""
    found = [r["answers"] for r in records if r["kind"] == "turn" and r["group"] == group]
    return [answers for answers in found if all(way in answers for way in ways)]


def pairs(records: Records, group: str, way: str, other: str) -> list[float]:
    """Return the seconds of ``way`` over those of ``other``, turn by turn."""
    return [a[way]["seconds"] / a[other]["seconds"] for a in turns_of(records, group, way, other)]


def bounds(records: Records, group: str, way: str) -> list[float]:
    """Return the seconds of ``way`` over max(compute, disk), turn by turn."""
    return [
        a[way]["seconds"] / max(a[MEMORY]["seconds"], a[way]["bytes"] / a[way]["rate"])
        for a in turns_of(records, group, way, MEMORY)
    ]


def rows_of(records: Records) -> list[OffloadRow]:
    """Return a row for each way of each group that was measured."""
    measured = [r for r in records if r["kind"] == "turn"]
    seen = dict.fromkeys((r["group"], way) for r in measured for way in r["ways"])
    return [_row(records, group, way) for group, way in seen]


def _row(records: Records, group: str, way: str) -> OffloadRow:
    answers_found = [answers[way] for answers in turns_of(records, group, way)]
    job = next(r for r in records if r["kind"] == "turn" and r["group"] == group)

    def median(name: str) -> float:
        return float(statistics.median(one[name] for one in answers_found))

    ratios = pairs(records, group, way, MEMORY)
    over = bounds(records, group, way) if way in OFFLOADED else []
    return OffloadRow(
        group=group,
        way=way,
        parameters=job["parameters"],
        rows=job["rows"],
        drives=job["drives"],
        rounds=len(answers_found),
        seconds=median("seconds"),
        processor=median("processor"),
        system=median("system"),
        faults=median("faults"),
        samples_per_second=job["rows"] / median("seconds"),
        over_memory=statistics.median(ratios) if ratios else None,
        peak_bytes=max(one["peak"] for one in answers_found),
        anonymous_bytes=max(one["anonymous"] for one in answers_found),
        device_bytes=max(one.get("device_peak", 0) for one in answers_found),
        on_disk=max(one["on_disk"] for one in answers_found),
        moved=median("bytes"),
        rate=median("rate") if way in OFFLOADED else None,
        over_bound=statistics.median(over) if over else None,
        redone=statistics.fmean(one["redone"] for one in answers_found),
        swapped=median("swapped"),
        recomputed=int(median("recomputed")),
    )


def goals_of(records: Records) -> list[Goal]:
    """Return the goals that were measured: the issue's, over the groups of the part ``goals``."""
    groups = dict.fromkeys(
        r["group"] for r in records if r["kind"] == "turn" and r["group"].startswith("goals/")
    )
    found: list[Goal] = []

    def add(what: str, values: Sequence[float], goal: float, at_least: bool) -> None:
        if values:
            found.append(
                Goal(
                    what=f"{group}: {what}", value=statistics.median(values), goal=goal, at_least=at_least,
                    pairs=len(values), low=min(values), high=max(values),
                )
            )  # fmt: skip

    def speeds(other: str) -> list[float]:
        return pairs(records, group, other, ACTIVE)

    for group in groups:
        regime = group.split("/", 2)[2]
        if regime == COMPUTE:
            add("samples/s over AdamW in memory", speeds(MEMORY), 0.95, True)
            both = turns_of(records, group, ACTIVE, MEMORY)[-1:]
            shares = [a[ACTIVE]["peak"] / a[MEMORY]["peak"] for a in both]
            add("peak memory over AdamW's in memory", shares, 0.5, False)
        if regime == IO:
            add("samples/s over serial", speeds(SERIAL), 1.35, True)
            add("samples/s over naive", speeds(NAIVE), 1.25, True)
        if regime in (COMPUTE, BALANCED, IO):
            add("a step over max(compute, disk)", bounds(records, group, ACTIVE), 1.05, False)
        else:
            add("a step over AdamW in memory", pairs(records, group, ASIDE, MEMORY), 1.02, False)
    return found


def table(records: Records) -> list[str]:
    """Return all tables as lines for a person."""
    tables = (
        _steps(rows_of(records)),
        _given_back(records),
        _sizes(records),
        _goals(goals_of(records)),
        _left_out(records),
    )
    lines = [line for one in tables if one for line in (*one, "")]
    return lines[:-1] or ["nothing was measured yet"]


def _steps(rows: Sequence[OffloadRow]) -> list[str]:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        lines.append(f"{group}, batch of {mine[0].rows}")
        lines.append(
            f"  {'':<28}{'s/step':>8}{'CPU s':>8}{'kernel s':>10}{'faults':>9}{'samples/s':>11}{'over AdamW':>12}"
            f"{'peak MB':>9}{'anon MB':>9}{'GPU MB':>9}{'disk MB':>9}{'MB moved':>10}{'MB/s':>7}{'over bound':>12}"
            f"{'redone':>8}{'swapped MB':>12}{'recomputed':>12}"
        )
        lines += [_step(row) for row in mine]
    return lines


def _step(row: OffloadRow) -> str:
    return (
        f"  {WAYS[row.way]:<28}{row.seconds:>8.3f}{row.processor:>8.3f}{row.system:>10.3f}{row.faults:>9.0f}"
        f"{row.samples_per_second:>11.1f}"
        f"{_or_dash(row.over_memory):>12}"
        f"{row.peak_bytes / 1e6:>9.0f}{row.anonymous_bytes / 1e6:>9.0f}{row.device_bytes / 1e6:>9.0f}"
        f"{row.on_disk / 1e6:>9.0f}"
        f"{row.moved / 1e6:>10.0f}{_or_dash(row.rate, lambda rate: f'{rate / 1e6:.0f}'):>7}"
        f"{_or_dash(row.over_bound):>12}{row.redone:>8.0%}"
        f"{row.swapped / 1e6:>12.0f}{row.recomputed:>12}"
    )


def _or_dash(value: float | None, form: Callable[[float], str] = "{:.3f}".format) -> str:
    return "-" if value is None else form(value)


def sizes_of(records: Records) -> list[dict[str, Any]]:
    """Return the largest tails."""
    return [
        {name: value for name, value in r.items() if name != "kind"} for r in records if r["kind"] == "size"
    ]


def _given_back(records: Records) -> list[str]:
    found = next((r for r in records if r["kind"] == "given back"), None)
    if found is None:
        return []
    shares = ", ".join(f"{found[name]:.0%} of {name}" for name in ("values", "average", "squares"))
    return [f"a step of AdamW that is taken back by arithmetic gives back the bits of {shares}"]


def _sizes(records: Records) -> list[str]:
    found = sizes_of(records)
    lines = [
        f"  {WAYS[one['way']]:<28}{one['parameters'] / 1e6:>8.0f} M parameters in {one['cap'] / 1e9:.1f} GB, "
        f"batch of {one['rows']} ({one['how']})"
        for one in found
    ]
    return ["largest tail that trains under a bound of the memory", *lines] if lines else []


def _goals(goals: Sequence[Goal]) -> list[str]:
    lines = []
    for goal in goals:
        sign, word = "at least" if goal.at_least else "at most", "reached" if goal.reached else "missed"
        spread = f"{goal.low:.3f} to {goal.high:.3f}, {goal.pairs} pairs"
        lines.append(f"  {goal.what}: {goal.value:.3f} ({spread}); goal {sign} {goal.goal:g}: {word}")
    return ["goals", *lines] if lines else []


def left_out(records: Records) -> list[str]:
    """Return what was not measured, with the reasons."""
    return [f"{r['group']}, {WAYS[r['way']]}: {r['why']}" for r in records if r["kind"] == "left out"]


def _left_out(records: Records) -> list[str]:
    lines = left_out(records)
    return ["left out", *(f"  {line}" for line in lines)] if lines else []
