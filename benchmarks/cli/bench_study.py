"""``benchmarks sweep`` and the tables that are views of it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cli.bench_flags import known_models
from hapi.cli.shared.numbers import DAY, count, rate, seconds, size

RESULTS = "bench-results/sweep.jsonl"
_VIEWS = {
    "optimality": "share of optimal, within 5%, 10%, 15% for every strategy (HAPI, Table 3)",
    "estimates": "estimated against measured epoch seconds (HAPI, Figure 11)",
    "competitors": "every strategy's epoch beside auto's (HAPI, Figures 7 to 10)",
    "splits": "epoch seconds at every split (HAPI, Figure 3)",
    "bandwidth": "the chosen split by bandwidth (HAPI, Figure 13)",
    "traffic": "bytes over the wire by strategy (earlier HAPI text, Figures 10 and 12)",
    "cpu-client": "auto beside not splitting on a client without a GPU (earlier HAPI text, Figure 9)",
}
STUDIES = ("sweep", *_VIEWS)
"""Sub-commands that this module runs."""


def configure_studies(benchmarks: Any) -> None:
    """Add the sweep and its views to ``benchmarks``."""
    sweep = benchmarks.add_parser(
        "sweep",
        help="measure every split of every model, batch and bandwidth (root; hours, goes on where it was)",
    )
    extent = sweep.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="2 models, 2 batches, 2 bandwidths: minutes")
    extent.add_argument("--paper", action="store_true", help="the papers' sizes, for a GPU on each side")
    sweep.add_argument("--model", action="append", metavar="NAME", help="may be repeated")
    sweep.add_argument(
        "--bs", type=count(1, 1 << 20), action="append", metavar="N", help="training batch; may be repeated"
    )
    sweep.add_argument("--bandwidth", type=rate(), action="append", metavar="RATE", help="may be repeated")
    sweep.add_argument(
        "--seconds", type=seconds(0), metavar="TIME", help="stop after the cell that is under way then"
    )
    sweep.add_argument("--results", default=RESULTS, metavar="FILE", help=f"JSON lines (default {RESULTS})")
    sweep.add_argument(
        "--enough",
        type=seconds(1e-3, DAY),
        metavar="TIME",
        help="of epochs at each split that decides, unless they tell before (default 20 s; more goes on with cells "
        "that are done)",
    )
    sweep.add_argument(
        "--profiles",
        type=count(1, 100),
        metavar="N",
        help="of each cell, of which the mean counts (default 2; more goes on with cells that are done)",
    )
    sweep.add_argument(
        "--memory",
        type=size(1 << 20),
        metavar="SIZE",
        help="bytes that the client may use (default: what is free)",
    )
    add_no_bed(sweep)
    for name, text in _VIEWS.items():
        view = benchmarks.add_parser(name, help=f"from a sweep: {text}".replace("%", "%%"))
        view.add_argument(
            "--results",
            default=RESULTS,
            metavar="FILE",
            help=f"of python -m benchmarks sweep (default {RESULTS})",
        )
        view.add_argument(
            "--replay",
            action="store_true",
            help="let the strategies choose anew from the profiles in FILE, with the cost model as it is now",
        )
        view.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
        view.add_argument("--csv", metavar="FILE", help="also write what it is made of, a row for each split")
        view.add_argument(
            "--json", metavar="FILE", help="the same as JSON, with the table and the conditions"
        )


def add_no_bed(benchmark: argparse.ArgumentParser) -> None:
    """The flag of every benchmark that can do without a test bed."""
    benchmark.add_argument(
        "--no-bed",
        action="store_true",
        help="no network namespaces, also where they could be made: the client limits the rate",
    )


def run_study(args: argparse.Namespace) -> int:
    """Measure, or print one view with the conditions of what was measured."""
    return _sweep(args) if args.benchmark == "sweep" else _view(args)


def _sweep(args: argparse.Namespace) -> int:
    from benchmarks.split.sweep import sweep, sweep_conditions
    from benchmarks.testbed.cells import PAPER, QUICK, Grid, Results
    from benchmarks.testbed.conditions import conditions
    from benchmarks.testbed.loose import LooseBed, choose_bed

    grid = PAPER if args.paper else QUICK if args.quick else Grid()
    if args.model:
        grid = replace(grid, models=known_models(args.model))
    if args.bs:
        grid = replace(grid, batches=tuple(args.bs))
    if args.bandwidth:
        grid = replace(grid, bandwidths=tuple(args.bandwidth))
    if args.memory:
        grid = replace(grid, memory=args.memory)
    if args.enough:
        grid = replace(grid, enough=args.enough)
    if args.profiles:
        grid = replace(grid, profile_parts=args.profiles)
    bed = choose_bed(args.no_bed)
    limited = isinstance(bed, LooseBed)
    found = {**conditions(), **sweep_conditions(grid), "test_bed": bed.describe(), "limited": limited}
    results = Results(Path(args.results), found)
    sweep(bed, grid, results, lambda line: print(line, file=sys.stderr, flush=True), seconds=args.seconds)
    print(f"measured into {args.results}; look at it with python -m benchmarks {'|'.join(_VIEWS)}")
    return 0


def _view(args: argparse.Namespace) -> int:
    from benchmarks.split.plots import draw
    from benchmarks.split.replay import replayed
    from benchmarks.split.study import measured_cells, rows, unfit_cells
    from benchmarks.split.views import VIEWS
    from benchmarks.testbed.cells import read
    from benchmarks.testbed.conditions import condition_lines, recorded_conditions, write_json
    from benchmarks.testbed.export import write_csv

    records = list(read(Path(args.results)))
    if args.replay:
        records = list(replayed(records))
    cells = measured_cells(records)
    table = VIEWS[args.benchmark](cells)
    counted = f"{len(cells)} cells, {unfit_cells(records)} that fitted no memory"
    if args.replay:
        counted += "; choices and estimates made anew from their profiles"
    print("\n".join([*table, "", counted, *condition_lines(recorded_conditions(records))]))
    if args.json:
        heads = [r for r in records if r["kind"] == "conditions"]
        document = {"benchmark": args.benchmark, "table": table, "rows": rows(cells), "conditions": heads}
        write_json(args.json, document)
    if args.csv:
        write_csv(args.csv, rows(cells))
    if args.figure:
        draw(args.benchmark, cells, args.figure)
    return 0
