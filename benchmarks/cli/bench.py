"""``benchmarks``: measure, and print the figures with their conditions."""

from __future__ import annotations

import argparse

from benchmarks.cli import fleet, jobs, keep, load, models, offload, serving, split, storage
from benchmarks.cli.benchmark import Outcome
from hapi.paths import check_outputs

BENCHMARKS = (
    *split.BENCHMARKS,
    *jobs.BENCHMARKS,
    *keep.BENCHMARKS,
    *serving.BENCHMARKS,
    *load.BENCHMARKS,
    *fleet.BENCHMARKS,
    *storage.BENCHMARKS,
    *models.BENCHMARKS,
    *offload.BENCHMARKS,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options to ``parser``."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for benchmark in BENCHMARKS:
        benchmark.configure(benchmarks)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and print its table and conditions; return the exit code.

    Output files are checked before anything is measured.
    """
    from hapi.figures.canvas import check_suffix

    outputs = [(f"--{name}", getattr(args, name, None)) for name in ("json", "csv", "figure")]
    check_outputs(outputs, [("--results", getattr(args, "results", None))])
    if getattr(args, "figure", None):
        check_suffix(args.figure)
    outcome: Outcome | None = args.run(args)
    if outcome is not None:
        _write(outcome, args)
    return 0


def _write(outcome: Outcome, args: argparse.Namespace) -> None:
    from benchmarks.testbed.conditions import condition_lines, write_csv, write_json

    print("\n".join([*outcome.table, "", *condition_lines(outcome.conditions)]))
    if args.json:
        write_json(args.json, outcome.document)
    if getattr(args, "csv", None):
        write_csv(args.csv, outcome.rows)
    if outcome.draw is not None and args.figure:
        outcome.draw(args.figure)
