"""The page of the fleet's figures, written from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fleet.experiments import ENOUGH, KNEE_TRAINERS

GOALS = {"median": 0.05, "worst": 0.10}
"""Errors on cells that were not fitted, at most."""


def page(document: Mapping[str, Any], name: str) -> str:
    """Return the page in Markdown.

    Args:
        document: of the benchmark.
        name: file of the same document.
    """
    parts = (_head(document, name), _cells(document), _knees(document), _herd(document), _scale(document))
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def cell_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the table of the cells: measured beside simulated samples per second."""
    lines = [
        "| servers | trainers | link, Mbit/s | step, ms | measured | simulated | error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["cells"]:
        link = f"{row['link'] / 1e6:g}"
        link += f", all {row['shared'] / 1e6:g}" if row["shared"] else ""
        link += f", one {row['link'] * row['slow'] / 1e6:g}" if row["slow"] != 1 else ""
        lines.append(
            f"| {row['servers']} | {row['trainers']} | {link} | {row['pause'] * 1e3:g} | {row['measured']:.1f} | "
            f"{row['simulated']:.1f} | {row['error']:+.1%} | {'' if row['hold_out'] else 'fitted'} |"
        )
    return lines


def verdict(document: Mapping[str, Any]) -> str:
    """Return the errors on the cells that were not fitted, beside their goals."""
    found = document["held_out"]
    words = ", ".join(
        f"{name} {found[name]:.1%} (goal {goal:.0%}: {'met' if found[name] <= goal else 'missed'})"
        for name, goal in GOALS.items()
    )
    return f"{found['count']} cells that were not fitted: {words}"


def _head(document: Mapping[str, Any], name: str) -> list[str]:
    found = document["conditions"]
    where = (
        f"{str(found['date'])[:10]}, {found['processor']}, {found['cores']} shared cores at a load of "
        f"{found['load_at_start']}. Written by `python -m benchmarks fleet` from `{name}`."
    )
    return ["# Fleets: the simulator beside real servers, and what it tells of larger ones", "", where]


def _cells(document: Mapping[str, Any]) -> list[str]:
    how = (
        f"Bed: {document['test_bed']}. Real `hapi-server` processes, and real sessions whose step is a pause; "
        f"{document['job']}. Samples per second of all trainers."
    )
    fit = (
        f"Fitted to the cells so marked: a request's overhead of {document['overhead'] * 1e3:.2f} ms, "
        f"{document['efficiency']:.1%} of a link's bandwidth for contents. {verdict(document)}."
    )
    return ["## Beside the test bed", "", how, "", fit, "", *cell_lines(document)]


def _knees(document: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = document["knees"]
    if not rows:
        return []
    counts = list(rows[0]["rates"])
    how = (
        f"Simulated: {KNEE_TRAINERS} trainers with `--split auto`, {document['machines']}; every server and trainer "
        "has its own link. Samples per second by the number of servers, with the usual split. A fleet is large "
        f"enough at {ENOUGH:.0%} of the largest rate."
    )
    lines = [
        "## Knees",
        "",
        how,
        "",
        "| model | links, Mbit/s | " + " | ".join(counts) + " | enough | servers per trainer |",
        "|---" * (len(counts) + 4) + "|",
    ]
    for row in rows:
        cells = [f"{row['rates'][count]:.0f} ({row['splits'][count]})" for count in counts]
        enough = f"{row['knee']} | {row['per_trainer']:.2f}"
        lines.append(f"| {row['model']} | {row['link'] / 1e6:g} | {' | '.join(cells)} | {enough} |")
    return lines


def _herd(document: Mapping[str, Any]) -> list[str]:
    rows = document["herd"]
    if not rows:
        return []
    fixed = [row for row in rows if row["fixed"]]
    best = max(fixed, key=lambda row: row["samples_per_second"])
    how = (
        f"Simulated: {document['herd_fleet']}. Share: samples per second over those of the best fixed cut "
        f"({best['name']}: {best['samples_per_second']:.0f}). Moved: the largest share of the trainers whose cut "
        "changed within 4 s."
    )
    lines = [
        "## Do planners herd?",
        "",
        how,
        "",
        "| a change is made | share | changes in 100 batches | moved |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['samples_per_second'] / best['samples_per_second']:.1%} | "
        f"{row['changes_per_100_batches']:.2f} | {row['moved']:.0%} |"
        for row in rows
        if not row["fixed"]
    ]
    return [*lines, "", *document.get("herd_notes", [])]


def _scale(document: Mapping[str, Any]) -> list[str]:
    if not document["scale"]:
        return []
    how = (
        "Simulated: 20 s, of which 14 count; 1 Gbit/s a server, 100 Mbit/s a trainer, which knows four servers drawn "
        "by chance. One server in 100 fails for 4 s, one is ten times as slow. Coarse: a request is one frame, and the "
        "links' rates are found once in 20 ms."
    )
    names = (
        "servers", "trainers", "", "samples/s", "stalled", "request p50, p99, s", "wait for a slot p50, p99, s", "CPU",
        "changes", "simulated in, s",
    )  # fmt: skip
    lines = ["## Up to 10,000 trainers", "", how, "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in document["scale"]:
        seconds = [f"{row[name]['p50']:.3f}, {row[name]['p99']:.3f}" for name in ("latency", "wait")]
        fields = (
            row["servers"], row["trainers"], "coarse" if row["coarse"] else "fine", f"{row['samples_per_second']:.0f}",
            f"{row['stalled']:.0%}", *seconds, f"{row['processors']:.0%}", row["changes"],
            f"{row['wall_seconds']:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, fields))} |")
    return lines
