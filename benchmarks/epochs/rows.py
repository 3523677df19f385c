"""Rows and verdict of the benchmark ``epochs``, from the records of its runs. Pure.

Later epochs of a way are alike, so that only the first ones are run, and the seconds of a longer job are computed: each
epoch that was not run takes the median of those run after epoch 0, the second half of them. Rows say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.epochs.settings import CODEC_PAIRS, WAYS, Prices, way_of
from hapi.units import format_bandwidth

Record = Mapping[str, Any]

BY_HAND, RECOMPUTED, ALTERNATING, OURS = "plain", "recompute", "alternating", "hapi"
MOST_OF_BY_HAND = 1.0
"""Goal: job seconds over those of the plain script."""
LEAST_GAIN = 7.0
"""Goal: job seconds of recomputing over Hapi's."""
MOST_OF_FIRST = 1.03
"""Goal: seconds of Hapi's epoch 0 over those of one without a cache."""
MOST_OF_RAW = 1.01
"""Goal: seconds of a job's epochs with a codec that is chosen over those without one."""


_HEAD = "  {:<23}{:>6}{:>11}{:>8}{:>10}{:>9}{:>11}{:>10}{:>9}".format(
    "", "epochs", "job", "start", "epoch 0", "later", "over link", "server", "money"
)
_LOSSES = "  losses differ by at most {:.1e} of the loss, among runs of Hapi by {:.1e}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of doing a job of so many epochs in one cell; medians over the repeats."""

    cell: str
    model: str
    bandwidth: float
    """Bits per second."""
    way: str
    epochs: int
    measured_epochs: int
    """Epochs that were run; the seconds, bytes and processor seconds of the others are computed."""
    seconds: float
    """The whole job, from its process's start to its end."""
    start_seconds: float
    first_seconds: float
    """Epoch 0."""
    later_seconds: float | None
    """A later epoch; None where none was run."""
    bytes_received: float
    """Bytes that left the store's side, of the whole job."""
    server_cpu_seconds: float
    money: float
    loss: float
    """Mean loss of the last epoch that was run."""

    @property
    def computed(self) -> bool:
        """Return whether part of the job was computed, not run."""
        return self.measured_epochs < self.epochs

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {**asdict(self), "computed_epochs": self.epochs - self.measured_epochs}


def rows_of(records: Sequence[Record], counts: Sequence[int], prices: Prices) -> list[Row]:
    """Return the rows of all cells in ``records``.

    Args:
        records: of one file.
        counts: numbers of epochs to show, as far as they were measured.
        prices: of bytes and processors.
    """
    runs = _longest([record for record in records if record["kind"] == "run"])
    found = []
    for cell in dict.fromkeys(run["cell"] for run in runs):
        for way in WAYS:
            for count in sorted(counts):
                repeats = [
                    run
                    for run in runs
                    if (run["cell"], run["way"]) == (cell, way.name)
                    and (run["planned"] == count if way.by_epochs else True)
                    and (len(run["epochs"]) >= min(count, 2))
                ]
                if repeats:
                    found.append(_row(repeats, count, prices))
    return found


def _longest(runs: Sequence[Record]) -> list[Record]:
    """The longest of runs that measured the same, the last of those as long."""
    kept: dict[tuple[object, ...], Record] = {}
    for run in runs:
        planned = run["planned"] if way_of(run["way"]).by_epochs else None
        key = (run["cell"], run["way"], planned, run["repeat"])
        if key not in kept or len(run["epochs"]) >= len(kept[key]["epochs"]):
            kept[key] = run
    return list(kept.values())


def _row(repeats: Sequence[Record], count: int, prices: Prices) -> Row:
    """The row of runs of one way, one for each repeat."""

    def middle(value: Callable[[Record], float]) -> float:
        """The median over the repeats."""
        return float(statistics.median(map(value, repeats)))

    first, measured = repeats[0], min(count, *(len(run["epochs"]) for run in repeats))
    seconds = middle(lambda run: run["start"] + run["end"] + total(run, "seconds", count))
    nbytes = middle(lambda run: total(run, "bytes", count))
    server = middle(lambda run: total(run, "server_cpu", count))
    return Row(
        cell=first["cell"],
        model=first["model"],
        bandwidth=first["bandwidth"],
        way=first["way"],
        epochs=count,
        measured_epochs=measured,
        seconds=seconds,
        start_seconds=middle(lambda run: run["start"]),
        first_seconds=middle(lambda run: run["epochs"][0]["seconds"]),
        later_seconds=middle(lambda run: later(run, "seconds")) if len(first["epochs"]) > 1 else None,
        bytes_received=nbytes,
        server_cpu_seconds=server,
        money=prices.of(nbytes, server, seconds),
        loss=first["epochs"][measured - 1]["loss"],
    )


def total(run: Record, name: str, count: int) -> float:
    """Return the sum of ``name`` over a job's ``count`` epochs; those that were not run are computed."""
    epochs = run["epochs"][:count]
    left = count - len(epochs)
    return float(sum(epoch[name] for epoch in epochs) + (left * later(run, name) if left else 0.0))


def later(run: Record, name: str) -> float:
    """Return ``name`` of an epoch after the first ones: the median of the second half of those after epoch 0."""
    after = [epoch[name] for epoch in run["epochs"][1:]]
    return float(statistics.median(after[len(after) // 2 :]))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal in one cell."""

    cell: str
    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Return whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        """Return the goal with its verdict."""
        return {**asdict(self), "reached": self.reached}


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of each cell at its largest number of epochs, as far as the ways that they compare were run."""
    found = []
    for cell in dict.fromkeys(row.cell for row in rows):
        count = max(row.epochs for row in rows if row.cell == cell)
        mine = {row.way: row for row in rows if (row.cell, row.epochs) == (cell, count)}
        ours, by_hand, recomputed = (mine.get(way) for way in (OURS, BY_HAND, RECOMPUTED))
        if ours is None:
            continue
        if by_hand is not None:
            name = f"job of {count} epochs over the plain script's"
            found.append(
                Goal(cell=cell, name=name, value=ours.seconds / by_hand.seconds, bound=MOST_OF_BY_HAND)
            )
        if recomputed is not None:
            gain = recomputed.seconds / ours.seconds
            name = f"recomputing over the job of {count} epochs"
            found.append(Goal(cell=cell, name=name, value=gain, bound=LEAST_GAIN, at_least=True))
            first = ours.first_seconds / mine.get(ALTERNATING, recomputed).first_seconds
            found.append(
                Goal(cell=cell, name="epoch 0 over one without a cache", value=first, bound=MOST_OF_FIRST)
            )
    return found


def codec_goals(records: Sequence[Record]) -> list[Goal]:
    """Return the goal of each codec that was chosen, in each cell: the median of the ratios of its repeats."""
    runs = {
        (r["cell"], r["way"], r["repeat"]): r for r in _longest([r for r in records if r["kind"] == "run"])
    }
    found = []
    for cell in dict.fromkeys(cell for cell, _, _ in runs):
        for chosen, raw in CODEC_PAIRS:
            pairs = [
                (run, runs[cell, raw, repeat])
                for (its_cell, way, repeat), run in runs.items()
                if (its_cell, way) == (cell, chosen) and (cell, raw, repeat) in runs
            ]
            if pairs:
                ratios = [_epochs_seconds(one) / _epochs_seconds(other) for one, other in pairs]
                name = f"{chosen} over {raw}, {len(pairs)} pairs ({min(ratios):.3f} to {max(ratios):.3f})"
                found.append(Goal(cell=cell, name=name, value=statistics.median(ratios), bound=MOST_OF_RAW))
    return found


def _epochs_seconds(run: Record) -> float:
    return float(sum(epoch["seconds"] for epoch in run["epochs"]))


def loss_difference(records: Sequence[Record], ways: Sequence[str]) -> dict[str, float]:
    """Return the largest difference of an epoch's losses among ``ways``, over the smaller, by cell."""
    losses: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record["kind"] == "run" and record["way"] in ways:
            for number, epoch in enumerate(record["epochs"]):
                losses.setdefault(record["cell"], {}).setdefault(number, []).append(epoch["loss"])
    return {
        cell: max((max(found) - min(found)) / min(found) for found in by_epoch.values())
        for cell, by_epoch in losses.items()
    }


def table(records: Sequence[Record], rows: Sequence[Row], prices: Prices) -> list[str]:
    """Return the rows and the verdict as lines for a person."""
    lines: list[str] = []
    jobs = {record["cell"]: record["job"] for record in records if record["kind"] == "run"}
    ours = [way.name for way in WAYS if way.flags is not None]
    among_all, among_ours = (loss_difference(records, ways) for ways in ([way.name for way in WAYS], ours))
    for cell in dict.fromkeys(row.cell for row in rows):
        mine = [row for row in rows if row.cell == cell]
        lines += [
            f"{mine[0].model} at {format_bandwidth(mine[0].bandwidth)}: {jobs[cell]}",
            _HEAD,
            *(_line(row) for row in mine),
            _LOSSES.format(among_all.get(cell, 0.0), among_ours.get(cell, 0.0)),
            "",
        ]
    if any(row.computed for row in rows):
        lines.append(
            "~ computed: epochs that were not run take the median of those that were; --full runs all of them"
        )
    lines.append(
        f"money: {prices.egress:g} for each GB over the link, {prices.server:g} for each hour of a processor beside "
        f"the store, {prices.trainer:g} for each hour of the trainer"
    )
    return lines + [_verdict(goal) for goal in (*goals_of(rows), *codec_goals(records))]


def _line(row: Row) -> str:
    later_text = f"{row.later_seconds:.2f} s" if row.later_seconds is not None and row.epochs > 1 else "-"
    job = f"{'~' if row.computed else ''}{row.seconds:.1f} s"
    return (
        f"  {way_of(row.way).title:<23}{row.epochs:>6}{job:>11}{row.start_seconds:>6.1f} s{row.first_seconds:>8.2f} s"
        f"{later_text:>9}{row.bytes_received / 1e6:>8.1f} MB{row.server_cpu_seconds:>8.1f} s{row.money:>9.4f}"
    )


def _verdict(goal: Goal) -> str:
    sign = "at least" if goal.at_least else "at most"
    verdict = "reached" if goal.reached else "missed"
    return f"goal, {goal.cell}: {goal.name} {sign} {goal.bound:g}: {goal.value:.3f}, {verdict}"
