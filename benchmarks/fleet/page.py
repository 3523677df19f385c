"""The page of the fleet's figures, written from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fleet import sizes
from benchmarks.fleet.experiments import ENOUGH, KNEE_TRAINERS

GOALS = {"median": 0.05, "worst": 0.10}
"""Errors on cells that were not fitted, at most."""


def page(document: Mapping[str, Any], name: str) -> str:
    """Return the page in Markdown.

    Args:
        document: of the benchmark.
        name: file of the same document.
    """
    parts = (
        _head(document, name), _cells(document), _sizing(document), _knees(document), _faults(document),
        _racks(document), _herd(document), _crowd(document), _large(document),
    )  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the fleets that were simulated, a line each."""
    return [
        f"{row['trainers']} trainers, {row['servers']} servers: {row['samples_per_second']:.0f} samples/s, "
        f"{row['stalled']:.0%} stalled, {row['requests']} requests in {row['wall_seconds']:g} s"
        for part in ("sizing", "faults", "racks", "crowd", "large")
        for row in document[part]
    ]


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
        runs = f" ({', '.join(f'{rate:.1f}' for rate in row['rates'])})" if len(row["rates"]) > 1 else ""
        lines.append(
            f"| {row['servers']} | {row['trainers']} | {link} | {row['pause'] * 1e3:g} | {row['measured']:.1f}{runs} | "
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
    spreads = [
        max(row["rates"]) / min(row["rates"]) - 1 for row in document["cells"] if len(row["rates"]) > 1
    ]
    own = (
        f"; runs of the bed itself differ by up to {max(spreads):.1%} ({len(spreads)} cells)"
        if spreads
        else ""
    )
    return f"{found['count']} cells that were not fitted: {words}{own}"


def _head(document: Mapping[str, Any], name: str) -> list[str]:
    found = document["conditions"]
    where = (
        f"{str(found['date'])[:10]}, {found['processor']}, {found['cores']} shared cores at a load of "
        f"{found['load_at_start']}. Written by `python -m benchmarks fleet` from `{name}`."
    )
    return ["# Fleets: the simulator beside real servers, and what it tells of larger ones", "", where]


def _cells(document: Mapping[str, Any]) -> list[str]:
    if not document["cells"]:
        return []
    how = (
        f"Bed: {document['test_bed']}. Real `hapi-server` processes, and real sessions whose step is a pause; "
        f"{document['job']}. Samples per second of all trainers."
    )
    fit = (
        f"Fitted to the cells so marked: a request's overhead of {document['overhead'] * 1e3:.2f} ms, "
        f"{document['efficiency']:.1%} of a link's bandwidth for contents, answers {document['jitter'] * 1e3:.1f} ms "
        f"late by chance. {verdict(document)}."
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
    return lines


def _sizing(document: Mapping[str, Any]) -> list[str]:
    rows = document["sizing"]
    if not rows:
        return []
    how = (
        f"Simulated: {sizes.MODEL}, batches of 64, every planner on its own; a trainer has a core, a server is "
        f"{sizes.SPEED:g} times as fast; 1 Gbit/s a server, 100 Mbit/s a trainer, which knows {sizes.KNOWN} servers "
        "drawn by chance and has 4 requests under way at most; 30 s after 15. Coarse: a "
        "request is one frame, and links' rates are found once in 20 ms. Bold: the fewest servers with "
        f"{ENOUGH:.0%} of the largest rate of as many trainers: what a fleet of that demand should hold."
    )
    largest: dict[int, float] = {}
    for row in rows:
        largest[row["trainers"]] = max(largest.get(row["trainers"], 0.0), row["samples_per_second"])
    enough: dict[int, int] = {}
    for row in rows:
        if row["samples_per_second"] >= ENOUGH * largest[row["trainers"]]:
            enough[row["trainers"]] = min(enough.get(row["trainers"], row["servers"]), row["servers"])
    return [
        "## What a demand needs",
        "",
        how,
        "",
        *_table(
            ("trainers", "servers", "samples/s", "of the largest", "stalled", "request p50, p99, s", "slot p99, s",
             "CPU", "split"),
            [
                (
                    str(row["trainers"]),
                    f"**{row['servers']}**" if enough[row["trainers"]] == row["servers"] else str(row["servers"]),
                    f"{row['samples_per_second']:.0f}",
                    f"{row['samples_per_second'] / largest[row['trainers']]:.0%}",
                    f"{row['stalled']:.0%}",
                    _both(row["latency"]),
                    f"{row['wait']['p99']:.2f}",
                    f"{row['processors']:.0%}",
                    str(row["split"]),
                )
                for row in rows
            ],
        ),
    ]  # fmt: skip


def _faults(document: Mapping[str, Any]) -> list[str]:
    rows = document["faults"]
    if not rows:
        return []
    how = (
        f"Simulated: {sizes.FAULT_TRAINERS} trainers, {sizes.FAULT_SERVERS} servers, the {sizes.FAULT_FOR:g} s in "
        "which it lasts; an answer that breaks goes on elsewhere."
    )
    return ["## Failures and stragglers", "", how, "", *_changed(rows, "name")]


def _racks(document: Mapping[str, Any]) -> list[str]:
    rows = document["racks"]
    if not rows:
        return []
    how = "Simulated: the same fleet, all answers over one link with so much of 100 Mbit/s for each trainer."
    return ["## A link that all share", "", how, "", *_changed(rows, "share")]


def _changed(rows: Sequence[Mapping[str, Any]], first: str) -> list[str]:
    usual = rows[0]["samples_per_second"]
    return _table(
        (first, "samples/s", "share", "slowest", "stalled", "request p50, p99, s", "retries", "hedged", "split"),
        [
            (
                str(row[first]), f"{row['samples_per_second']:.0f}", f"{row['samples_per_second'] / usual:.1%}",
                f"{row['slowest']:.1f}", f"{row['stalled']:.0%}", _both(row["latency"]), str(row["retries"]),
                str(row["extra"]), str(row["split"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def _crowd(document: Mapping[str, Any]) -> list[str]:
    rows = document["crowd"]
    if not rows:
        return []
    how = (
        f"Simulated: {sizes.CROWD_TRAINERS} trainers, {sizes.CROWD_SERVERS} servers, each trainer knows "
        f"{sizes.CROWD_KNOWN}; otherwise the herd's, its link in proportion. Share: of the best way of reacting."
    )
    best = max(row["samples_per_second"] for row in rows)
    return [
        "## Hundreds of planners at once",
        "",
        how,
        "",
        *_table(
            ("a change is made", "samples/s", "share", "changes in 100 batches", "moved"),
            [
                (
                    row["name"], f"{row['samples_per_second']:.0f}", f"{row['samples_per_second'] / best:.1%}",
                    f"{row['changes_per_100_batches']:.2f}", f"{row['moved']:.0%}",
                )
                for row in rows
            ],
        ),
    ]  # fmt: skip


def _large(document: Mapping[str, Any]) -> list[str]:
    rows = document["large"]
    if not rows:
        return []
    walls = " and ".join(f"{row['wall_seconds']:.0f}" for row in rows)
    how = (
        f"Simulated in {walls} s: {sizes.LARGE_TRAINERS} trainers of {sizes.MODEL}, batches of {sizes.LARGE_BS}, "
        f"{sizes.LARGE_SERVERS} servers {sizes.LARGE_SPEED:g} times as fast, of which each trainer knows "
        f"{sizes.KNOWN}; all answers over one link with {sizes.LARGE_SHARE * sizes.TRAINER_LINK / 1e6:g} Mbit/s for "
        "each trainer. Of "
        f"{sizes.LARGE_SECONDS:g} s the first third is not counted; in the second the link has "
        f"{sizes.LARGE_NARROW:.0%} and servers fail, in the last others are slow. All planners watch."
    )
    return ["## 10,000 trainers", "", how, "", *_changed(rows, "name")]


def _both(quantiles: Mapping[str, float]) -> str:
    return f"{quantiles['p50']:.2f}, {quantiles['p99']:.2f}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]
