"""The benchmark of fleets: real servers and trainers beside the simulator, and larger fleets in it."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.cli.benchmark import Benchmark, Outcome, tell
from benchmarks.cli.options import option, results, switch
from hapi.errors import UsageError
from hapi.paths import write_whole


def _fleet(args: argparse.Namespace) -> Outcome:
    from benchmarks.fleet.bed import FleetBed
    from benchmarks.fleet.cells import cells, method
    from benchmarks.fleet.engine import measure_cells
    from benchmarks.fleet.page import cell_lines, page, summary_lines, verdict
    from benchmarks.fleet.whole import PARTS, document_of, simulate_parts
    from benchmarks.testbed.cells import Results, read
    from benchmarks.testbed.conditions import conditions, recorded_conditions

    parts = args.part or PARTS
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part}: expected one of {', '.join(PARTS)}")
    if args.view:
        records = list(read(Path(args.results)))
    else:
        known = cells()
        bed = FleetBed(max(cell.servers for cell in known)).describe()
        found = Results(Path(args.results), {**conditions(), "test_bed": bed, "grid": method()})
        if "bed" in parts:
            measure_cells(found, known, tell)
        simulate_parts(found, parts, tell)
        records = found.records
    document = document_of(records, recorded_conditions(records), tell)
    if args.page:
        write_whole(args.page, page(document, Path(args.json).name if args.json else args.results), "--page")
    table = [*cell_lines(document), verdict(document)] if document["cells"] else summary_lines(document)
    return Outcome(table=table, conditions=document["conditions"], document=document)


BENCHMARKS = (
    Benchmark(
        name="fleet",
        help="real servers and trainers beside the simulator; larger fleets in it (goes on where it was)",
        options=(
            option(
                "--part",
                "bed (needs root), herd, knees, sizing, faults, racks, crowd or large; may be repeated (default all)",
                action="append",
                metavar="PART",
            ),
            switch("--view", "measure nothing; show what FILE has"),
            option("--page", "also write the page in Markdown", metavar="FILE"),
            results("bench-results/fleet.jsonl", "JSON lines; goes on where it was"),
        ),
        run=_fleet,
    ),
)
