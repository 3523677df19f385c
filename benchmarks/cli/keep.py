"""The benchmark of keeping: choices beside the best ones, forecasts of filling, and the model of one machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.cli.benchmark import Benchmark, Outcome, tell
from benchmarks.cli.options import number, option, results, switch
from hapi.cli.shared.numbers import count
from hapi.errors import UsageError
from hapi.profiler.reading import load_document

MOST_BYTES = 64 << 20
"""Bytes of results that are read."""
RESULTS = "bench-results/keep.jsonl"
PARTS = ("choices", "fill", "machine", "cells")


def _keep(args: argparse.Namespace) -> Outcome:
    from benchmarks.testbed.cells import Results, read
    from benchmarks.testbed.conditions import conditions

    parts = args.part or PARTS
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part}: expected one of {', '.join(PARTS)}")
    if args.trial and tuple(parts) != ("choices",):
        raise UsageError("--trial: only with --part choices")
    if args.view:
        return _outcome(list(read(Path(args.results))))
    known = _known(args.best)
    found = Results(Path(args.results), {**conditions(), "grid": {"trial": args.trial}})
    _measure(found, parts, known, args)
    return _outcome(found.records)


def _measure(found: Any, parts: Any, known: Any, args: argparse.Namespace) -> None:
    if "choices" in parts:
        from benchmarks.keep.choices import check_replay, replay_grid

        check_replay(found)
        replay_grid(found, args.cells, args.trial, known, tell)
    if "fill" in parts:
        from benchmarks.keep.filling import measure_fills

        measure_fills(found, args.repeats, args.fill_samples, tell)
    if "machine" in parts:
        from benchmarks.keep.one_machine import measure_machines

        measure_machines(found, tell)
    if "cells" in parts:
        from benchmarks.keep.cells import measure_cells

        measure_cells(found, tell)


def _known(name: str | None) -> list[dict[str, Any]]:
    """Records of cells in the kept results of an earlier run."""
    if name is None:
        return []
    document = load_document(name, MOST_BYTES, "give the JSON of an earlier run")
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list) or any(not isinstance(one, dict) or "kind" not in one for one in cells):
        raise UsageError(f"--best {name}: holds no replayed cells; give the JSON of an earlier run")
    return cells


def _outcome(records: list[dict[str, Any]]) -> Outcome:
    from benchmarks.keep.cells import cell_rows, cell_table
    from benchmarks.keep.choices import choice_table, summary
    from benchmarks.keep.filling import fill_table
    from benchmarks.keep.one_machine import errors_of, machine_table
    from benchmarks.testbed.conditions import recorded_conditions

    tables = (choice_table(records), fill_table(records), machine_table(records), cell_table(records))
    lines = [line for table in tables if table for line in (*table, "")]
    found = recorded_conditions(records)
    return Outcome(
        table=lines[:-1] or ["nothing was measured yet"],
        conditions=found,
        document={
            "benchmark": "keep",
            "choices": summary(records),
            "fills": [record for record in records if record["kind"] == "fill"],
            "one_machine": [
                {"key": record["key"], **errors_of(record)}
                for record in records
                if record["kind"] == "one machine"
            ],
            "measured": cell_rows(records),
            "cells": [record for record in records if record["kind"] in ("choice", "replay check")],
            "conditions": found,
        },
    )


BENCHMARKS = (
    Benchmark(
        name="keep",
        help="what is kept: choices beside the best ones, fills beside their forecasts (goes on where it was)",
        options=(
            option(
                "--part",
                f"of {', '.join(PARTS)}; may be repeated (default all; fill and cells need root)",
                action="append",
                metavar="PART",
            ),
            number("--cells", count(1, 100_000), "of the held grid that are replayed", "400"),
            number("--repeats", count(1, 100), "of each fill", "1"),
            number("--fill-samples", count(16, 2000), "whose features fill the cache, 1.2 MB each", "320"),
            switch("--trial", "replay cells of another grid, on which the choice may be improved"),
            option(
                "--best",
                "whose best choices of a cell are taken in place of a search (JSON of an earlier run)",
                metavar="FILE",
            ),
            switch("--view", "measure nothing; show what FILE has"),
            results(RESULTS, "JSON lines; goes on where it was"),
        ),
        run=_keep,
    ),
)
